"""Selection, per-layer decisions and numbers on the AITER backend."""

import json
import types

import pytest
import torch
import vllm.model_executor.kernels.linear as kernel_list
import vllm.platforms.rocm as rocm
from doubles import aiter_double, shared_data
from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers.fusion.quant_activation import (
    QuantizedActivation,
    get_input_quant_key,
)
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kMxfp8Dynamic,
)
from vllm.platforms import PlatformEnum, current_platform

import vllm_rocm_mxfp8
from vllm_rocm_mxfp8 import layout, process, reference

DATA = shared_data()
TABLE = DATA / aiter_double.TABLE_FILE if DATA else None
needs_table = pytest.mark.skipif(DATA is None, reason="../shared/data is not here")
OURS, ROCM, EMULATION = (
    "AiterMxfp8LinearKernel",
    "RocmDotScaledMxfp8LinearKernel",
    "EmulationMxfp8LinearKernel",
)


@pytest.fixture(autouse=True)
def host(monkeypatch):
    vllm_rocm_mxfp8.register()
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture(params=["v1", "v2"])
def double(request):
    with aiter_double.install(request.param, table=TABLE) as handle:
        yield handle


def select(shape=(5120, 2048)):
    return kernel_list.init_mxfp8_linear_kernel(weight_shape=shape)


def make_layer(n, k, block=None):
    layer = torch.nn.Module()
    spec, context, fmt = modelopt.resolve("MXFP8", None, "")
    if block:
        context = modelopt.CkptCtx(scale_block_size=(block, 32))
    layer.quant_method = modelopt.ModelOptLinearMethod(spec, context, fmt)
    layer.quant_method.create_weights(
        layer, k, [n], k, n, torch.bfloat16, weight_loader=lambda p, w: None
    )
    return layer


def load(layer, block=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n, k = layer.weight.shape
    data = torch.randn(n, k, generator=generator).mul(20).to(torch.float8_e4m3fn)
    scale = torch.randint(
        118, 136, (-(-n // block), k // 32), dtype=torch.uint8, generator=generator
    )
    layer.weight.data.copy_(data)
    layer.weight_scale.data.copy_(scale.repeat_interleave(block, dim=0)[:n])
    return data, scale


def process_weights(layer):
    layer.quant_method.process_weights_after_loading(layer)


def test_the_platform_is_vllms_own_and_holds_no_gpu():
    assert current_platform.is_rocm()
    assert rocm.on_gfx950()
    assert not torch.cuda.is_initialized()


def test_ours_is_first_and_the_others_follow_in_order(double):
    listed = kernel_list._POSSIBLE_MXFP8_KERNELS[PlatformEnum.ROCM]
    assert [k.__name__ for k in listed] == [OURS, ROCM, EMULATION]
    kernel = select()
    assert type(kernel).__name__ == OURS
    assert isinstance(kernel, kernel_list.RocmDotScaledMxfp8LinearKernel)


@pytest.mark.parametrize(
    ("arch", "code"), [("gfx942", "arch"), ("gfx1250", "arch"), ("gfx1201", "arch")]
)
def test_other_gpus_decline_without_touching_aiter(double, monkeypatch, arch, code):
    monkeypatch.setattr(rocm, "_GCN_ARCH", arch)
    verdict = process.verdict()
    assert verdict.code == code
    assert arch in verdict.text
    assert double.imports == []


@pytest.mark.parametrize("name", ["VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_LINEAR"])
def test_vllms_own_switches_are_followed(double, monkeypatch, name):
    monkeypatch.setenv(name, "0")
    assert process.verdict().code == "aiter_off"
    assert name in process.verdict().text
    assert type(select()).__name__ == ROCM
    assert double.imports == []


def test_batch_invariance_and_fp16_and_the_monokernel_decline(double, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert process.verdict().code == "batch_invariant"
    assert type(select()).__name__ == ROCM
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    for changes, words in (
        ({"model_config": types.SimpleNamespace(dtype=torch.float16)}, "float16"),
        ({"kernel_config": types.SimpleNamespace(monokernel=True)}, "--monokernel"),
    ):
        config = types.SimpleNamespace(**changes)
        with monkeypatch.context() as patch:
            patch.setattr("vllm.config.get_current_vllm_config_or_none", lambda c=config: c)
            verdict = process.model_verdict()
        assert not verdict.ok
        assert words in verdict.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"broken": "ImportError"}, "import failed with ImportError"),
        ({"broken": "RuntimeError"}, "import failed with RuntimeError"),
        ({"broken": "AssertionError"}, "import failed with AssertionError"),
        ({"broken": "OSError"}, "import failed with OSError"),
        ({"broken": "no_op"}, "has no gemm_a8w8_blockscale_bpreshuffle"),
        ({"generation": "old"}, "has no get_mxscale_bpreshuffle_config"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "aiter", "triton", "emulation"])
def test_a_broken_or_old_aiter_leaves_every_layer_loadable(options, words, backend):
    with aiter_double.install(version="0.1.22", table=TABLE, **options):
        verdict = process.verdict()
        assert verdict.code == "aiter"
        assert words in verdict.text
        assert "0.1.22" in verdict.text
        config = VllmConfig(kernel_config=KernelConfig(linear_backend=backend))
        with set_current_vllm_config(config):
            assert type(select()).__name__ == (EMULATION if backend == "emulation" else ROCM)


@pytest.mark.parametrize(
    ("backend", "name"),
    [("auto", OURS), ("aiter", OURS), ("triton", ROCM), ("emulation", EMULATION)],
)
def test_linear_backend_chooses(double, backend, name):
    with set_current_vllm_config(
        VllmConfig(kernel_config=KernelConfig(linear_backend=backend))
    ):
        assert type(select()).__name__ == name


@pytest.mark.parametrize(
    ("n", "k", "block", "code"),
    [
        (5120, 2048, 32, "ok"),
        (96, 64, 32, "ok"),
        (1160, 64, 32, "n_tile"),
        (48, 64, 32, "n_tile"),
        (16, 64, 32, "n_tile"),
        (5120, 288, 32, "k_tile"),
        (64, 96, 32, "k_tile"),
        (2560, 6144, None, "1x32"),
    ],
)
def test_each_layer_is_decided_when_weights_are_processed(double, n, k, block, code):
    layer = make_layer(n, k, block)
    _data, _ = load(layer, block or 1)
    before = layer.weight.data.clone()
    assert get_input_quant_key(layer) == kMxfp8Dynamic
    process_weights(layer)
    kernel = layer.quant_method.kernel
    assert kernel.verdict.code == code
    if code == "ok":
        assert layer.weight.shape == (n // 16, k // 32, 512)
        assert get_input_quant_key(layer) == kMxfp8Dynamic
    else:
        assert layer.weight.ndim == 2
        assert get_input_quant_key(layer) is None
        if layer.weight.dtype == torch.float8_e4m3fn:
            assert torch.equal(layer.weight.view(torch.uint8), before.view(torch.uint8))


def test_1x32_is_taken_when_every_probe_is_tuned(monkeypatch):
    rows = [(m, 256, 128) for m in (1, 32, 512, 2048)]
    with aiter_double.install("v2", table=TABLE, supports_1x32=True, rows_1x32=rows):
        layer = make_layer(256, 128)
        data, scale = load(layer)
        process_weights(layer)
        assert layer.quant_method.kernel.verdict.ok
        check_numbers(layer, data, scale, (1, 7))
    with aiter_double.install("v2", table=TABLE, supports_1x32=True, rows_1x32=rows[:-1]):
        from vllm_rocm_mxfp8.compat import aiter

        aiter.probe.cache_clear()
        layer = make_layer(256, 128)
        load(layer)
        process_weights(layer)
        assert layer.quant_method.kernel.verdict.code == "1x32"


@pytest.mark.parametrize("runs", [True, False])
def test_1x32_under_the_forced_backend_follows_aiters_word(monkeypatch, runs):
    monkeypatch.setenv("VLLM_ROCM_MXFP8_BACKEND", "aiter")
    with aiter_double.install("v2", table=TABLE, supports_1x32=runs):
        layer = make_layer(256, 128)
        load(layer)
        process_weights(layer)
        assert layer.quant_method.kernel.verdict.ok == runs


def check_numbers(layer, data, scale, tokens, limit=1e-3):
    n, k = data.shape
    for m in tokens:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
        got = layer.quant_method.apply(layer, x)
        want = reference.linear(x, data, scale)
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error < limit, f"M={m} N={n} K={k}: relative error {error:.2e}"
        assert got.dtype == torch.bfloat16


def shapes():
    if DATA is None:
        return []
    content = json.loads((DATA / "model_shapes.json").read_text())
    found = set()
    for name, model in content.items():
        if name == "note":
            continue
        for key, layers in model.items():
            if key.startswith("tp"):
                found |= {(n, k, model["scale_block"]) for n, k in layers.values()}
    return sorted(found)


@needs_table
@pytest.mark.parametrize(("n", "k", "block"), shapes())
def test_numbers_of_every_model_shape(n, k, block):
    with aiter_double.install("v2", table=TABLE) as handle:
        layer = make_layer(n, k, 32 if block == "32x32" else None)
        data, scale = load(layer, 32 if block == "32x32" else 1)
        process_weights(layer)
        if block == "1x32" or k % 64:
            assert not layer.quant_method.kernel.verdict.ok
            return
        check_numbers(layer, data, scale, (1, 7, 32, 33, 192, 1024))
        assert {c.path for c in handle.launches} == {"bmm"}
        assert {c.w_scale_block for c in handle.launches} == {"32x32"}


@pytest.mark.parametrize("fault", ["swapped_scale", "unshuffled"])
def test_a_wrong_layout_would_be_noticed(fault):
    with aiter_double.install("v2", table=TABLE, fault=fault):
        layer = make_layer(256, 128, 32)
        data, scale = load(layer, 32)
        process_weights(layer)
        with pytest.raises(AssertionError, match="relative error"):
            check_numbers(layer, data, scale, (33,))


def test_the_line_to_look_for(double):
    from importlib.metadata import PackageNotFoundError, version

    from vllm_rocm_mxfp8 import after_load

    try:
        flydsl = f", flydsl {version('flydsl')}"
    except PackageNotFoundError:
        flydsl = ""
    assert after_load.active_line() == (
        "active: AiterMxfp8LinearKernel ahead of RocmDotScaledMxfp8LinearKernel "
        f"(gfx950, vllm 0.33.0, aiter 0.1.28{flydsl})"
    )


def test_no_rows_launch_nothing(double):
    layer = make_layer(256, 128, 32)
    load(layer, 32)
    process_weights(layer)
    out = layer.quant_method.apply(layer, torch.empty(2, 0, 128, dtype=torch.bfloat16))
    assert out.shape == (2, 0, 256)
    assert double.calls == []


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(6, 128), (2, 3, 128), (2, 1, 3, 128)])
def test_quantized_activations_of_any_leading_shape(double, shape, scale_dtype):
    layer = make_layer(256, 128, 32)
    _data, _scale = load(layer, 32)
    process_weights(layer)
    x = torch.randn(6, 128).bfloat16()
    x_q, x_scale = reference.quantize(x)
    bias = torch.randn(256).bfloat16()
    activation = QuantizedActivation(
        x_q, x_scale.view(scale_dtype), torch.bfloat16, torch.Size(shape), kMxfp8Dynamic
    )
    got = layer.quant_method.apply(layer, activation, bias)
    assert got.shape == (*shape[:-1], 256)
    want = layer.quant_method.apply(layer, x, bias)
    assert torch.equal(got.reshape(6, 256), want)
    # Column-major storage of the right shape is read by its strides.
    strided = x_scale.T.contiguous().T
    activation = QuantizedActivation(
        x_q, strided, torch.bfloat16, torch.Size(shape), kMxfp8Dynamic
    )
    assert torch.equal(layer.quant_method.apply(layer, activation, bias).reshape(6, 256), want)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_key": kFp8DynamicTokenSym}, "reads activations quantized as"),
        ({"scale": torch.zeros(128, 4, dtype=torch.uint8)}, r"row-major \[6, 4\]"),
        ({"scale": torch.zeros(4, 6, dtype=torch.uint8)}, r"row-major \[6, 4\]"),
        ({"scale": torch.zeros(512, dtype=torch.uint8)}, r"row-major \[6, 4\]"),
        ({"scale": torch.zeros(6, 4)}, "uint8 or float8_e8m0fnu"),
        ({"orig_shape": torch.Size((5, 128))}, "cannot be"),
        ({"orig_shape": torch.Size((6, 256))}, r"\[\.\.\., 128\]"),
        ({"data": torch.zeros(6, 128, dtype=torch.int8)}, "int8"),
    ],
)
def test_a_misread_quantized_activation_is_an_error(double, changes, words):
    layer = make_layer(256, 128, 32)
    load(layer, 32)
    process_weights(layer)
    fields = {
        "data": torch.zeros(6, 128).to(torch.float8_e4m3fn),
        "scale": torch.zeros(6, 4, dtype=torch.uint8),
        "orig_dtype": torch.bfloat16,
        "orig_shape": torch.Size((6, 128)),
        "quant_key": kMxfp8Dynamic,
    }
    with pytest.raises(ValueError, match=words):
        layer.quant_method.apply(layer, QuantizedActivation(**{**fields, **changes}))
    assert double.launches == []


def test_a_preshuffled_weight_without_aiter_is_an_error_not_garbage(double):
    layer = make_layer(256, 128, 32)
    load(layer, 32)
    process_weights(layer)
    from vllm_rocm_mxfp8.compat import aiter
    from vllm_rocm_mxfp8.ops import linear

    with aiter_double.install(broken="OSError"):
        aiter.probe.cache_clear()
        linear.forget_backend()
        with pytest.raises(RuntimeError, match="no backend of this process reads that layout"):
            layer.quant_method.apply(layer, torch.zeros(2, 128).bfloat16())
    assert layout.is_preshuffled(layer.weight)
