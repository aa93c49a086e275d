"""The kernel class that vLLM selects. Thin: decisions are :mod:`capability`'s, the work
is the op's (:mod:`ops.linear`)."""

import functools
import importlib
import math
from typing import Any

import torch

from vllm_rocm_mxfp8 import capability, envs, layout, process
from vllm_rocm_mxfp8.compat import aiter
from vllm_rocm_mxfp8.compat import vllm as compat
from vllm_rocm_mxfp8.log import logger
from vllm_rocm_mxfp8.ops import linear as linear_op


@functools.cache
def kernel_class() -> type:
    """``AiterMxfp8LinearKernel``, built on vLLM's own ROCm kernel.

    A function, because the parent exists only once vLLM has imported its kernel list.
    """
    host = compat.current_host()

    class AiterMxfp8LinearKernel(host.rocm_kernel):  # type: ignore[misc, name-defined]
        """MXFP8 linear on preshuffled weights; what it declines, its parent serves.

        Off ROCm the parent cannot run: declined layers take the row-major torch path.
        """

        # All that apply needs is in tensors, so weights exported by vLLM's weight cache
        # can be used as they are.
        supports_pre_processed_weights = True

        def __init__(self, c: Any) -> None:
            super().__init__(c)
            envs.mark_kernel_selected()
            if parent_serves():
                linear_op.set_row_major(
                    _parent_row_major(host.rocm_kernel), compat.block32_gemm()
                )

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            if envs.mode() == "require" and process.unobserved():
                raise RuntimeError(f"VLLM_ROCM_MXFP8=require, but {process.unobserved()}")
            verdict = process.verdict()
            return verdict.ok, verdict.text or None

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            verdict = process.model_verdict()
            return verdict.ok, verdict.text or None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Preshuffle, or leave to the parent. A pure function of the loaded tensors
            and the declared scale block; runs again on every weight reload."""
            weight = layer.weight.data
            if weight.ndim != 2:
                raise RuntimeError(
                    f"this weight, of shape {list(weight.shape)}, is preshuffled already. It "
                    "comes from weights saved after loading (sharded state); load the original "
                    "checkpoint instead"
                )
            n, k = self.config.weight_shape
            self.verdict, scale = judge(layer, n, k)
            compat.advertise_quantized_input(layer, scale is not None)
            if scale is None:
                if parent_serves():
                    super().process_weights_after_loading(layer)
                elif self.verdict.code == "tensors":
                    raise ValueError(f"an MXFP8 linear cannot be served: {self.verdict.text}")
                else:
                    _keep_row_major(layer, n, k)
                return
            host.replace_parameter(layer, "weight", layout.shuffle(weight))
            host.replace_parameter(layer, "weight_scale", scale)

        def input_quant_key(self) -> Any:
            return compat.mxfp8_dynamic_key()

        def apply_weights(
            self, layer: torch.nn.Module, x: Any, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            """x [..., K] -> [..., N] in x's dtype, plus bias [N].

            x may be vLLM's QuantizedActivation with key ``kMxfp8Dynamic``: float8_e4m3fn
            data and row-major [M, K/32] E8M0 scales; the result has its original dtype and
            leading shape. Raises ValueError if it does not fit.
            """
            n, k = self.config.weight_shape
            data, scale, dtype = unpack(x, k)
            out = torch.ops.vllm_rocm_mxfp8.linear(
                data, scale, layer.weight, layer.weight_scale, n, k, dtype
            )
            # Outside the op, where Inductor can fuse it.
            return out if bias is None else out + bias

    AiterMxfp8LinearKernel.__qualname__ = "AiterMxfp8LinearKernel"
    return AiterMxfp8LinearKernel


def __getattr__(name: str) -> Any:
    # Pickle looks the class up by its module and name.
    if name == "AiterMxfp8LinearKernel":
        importlib.import_module(compat.KERNEL_LIST_MODULE)
        return kernel_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def unpack(x: Any, k: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.dtype]:
    """``(data [..., K], scale [M, K/32] or None, output dtype)`` of a linear's input.

    Raises ValueError for a QuantizedActivation of another kind, shape or layout.
    """
    if not isinstance(x, compat.quantized_activation_class() or ()):
        return x, None, x.dtype
    if x.quant_key != compat.mxfp8_dynamic_key():
        raise ValueError(
            f"this linear reads activations quantized as {compat.mxfp8_dynamic_key()}, "
            f"got {x.quant_key}"
        )
    shape = tuple(x.orig_shape)
    if x.data.dtype != torch.float8_e4m3fn or not shape or shape[-1] != k:
        raise ValueError(
            f"a quantized input of a K={k} linear must be float8_e4m3fn of original shape "
            f"[..., {k}], got {x.data.dtype} of {list(shape)}"
        )
    rows = math.prod(shape[:-1])
    if x.data.numel() != rows * k:
        raise ValueError(
            f"the quantized data is {list(x.data.shape)}, which cannot be {list(shape)}"
        )
    if tuple(x.scale.shape) != (rows, k // layout.TILE_K):
        raise ValueError(
            f"the scales of {rows} rows and K={k} must be row-major [{rows}, "
            f"{k // layout.TILE_K}], got {list(x.scale.shape)} (padded or swizzled for another "
            "kernel?)"
        )
    return x.data.reshape(shape), x.scale.contiguous(), x.orig_dtype


def parent_serves() -> bool:
    """Can vLLM's own ROCm kernel run here, for the layers that we decline?"""
    return bool(compat.current_host().rocm_kernel.is_supported()[0])  # type: ignore[attr-defined]


def judge(
    layer: torch.nn.Module, n: int, k: int
) -> tuple[capability.Verdict, torch.Tensor | None]:
    """Ask :mod:`capability` about a layer with row-major weights. With an ok verdict also
    its scales: [N/32, K/32] where blocks are declared and confirmed, else [N, K/32]."""
    backend = envs.backend()
    elsewhere, problem = compat.read_elsewhere(layer), _tensor_problem(layer, n, k)
    if elsewhere or problem:
        facts = capability.Layer(n, k, read_elsewhere=elsewhere, problem=problem)
        return capability.check_layer(facts, backend), None
    declared = compat.declared_scale_rows(layer)
    scale, confirmed = layout.block_scale(
        layer.weight_scale.data[:n, : k // layout.TILE_K], declared
    )
    facts = _shape_facts(n, k, layout.scale_block(scale, n, k), backend)
    verdict = capability.check_layer(facts, backend)
    if verdict.ok and not confirmed:
        logger.warning(
            "%s (N=%d, K=%d) is served with one scale per row: its checkpoint declares "
            "one per %d rows, which needs 32 rows per block, N a multiple of it, and "
            "equal scales inside each block",
            getattr(layer, "prefix", "") or "a linear",
            n,
            k,
            declared,
        )
    return verdict, scale if verdict.ok else None


def _shape_facts(n: int, k: int, block: str, backend: str) -> capability.Layer:
    if backend == "reference" or block == "32x32":
        return capability.Layer(n, k, block)
    library = aiter.probe()
    if isinstance(library, str):
        return capability.Layer(n, k, block, problem=library)
    tokens = (1, 32, 512, compat.max_batched_tokens())
    return capability.Layer(
        n,
        k,
        block,
        tuned_1x32=library.is_tuned(n, k, block, tokens),
        runs_1x32=library.reads_1x32(),
    )


def _tensor_problem(layer: torch.nn.Module, n: int, k: int) -> str:
    weight, scale = layer.weight, layer.weight_scale
    if weight.dtype != torch.float8_e4m3fn:
        return f"weight is {weight.dtype}, not float8_e4m3fn"
    if tuple(weight.shape) != (n, k):
        return f"weight is {list(weight.shape)}, the layer's shape [{n}, {k}]"
    if scale.dtype != torch.uint8:
        return f"weight_scale is {scale.dtype}, not uint8"
    if scale.ndim != 2 or scale.shape[0] < n or scale.shape[1] < k // layout.TILE_K:
        return f"weight_scale is {list(scale.shape)}, needed [{n}, {k // layout.TILE_K}]"
    return ""


def _keep_row_major(layer: torch.nn.Module, n: int, k: int) -> None:
    scale = layer.weight_scale.data[:n, : k // layout.TILE_K].contiguous()
    compat.current_host().replace_parameter(layer, "weight_scale", scale)


def _parent_row_major(parent: type) -> linear_op.RowMajor:
    def row_major(
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        # The parent's apply reads two attributes of the layer and nothing of itself.
        layer = torch.nn.Module()
        layer.weight, layer.weight_scale = weight, weight_scale
        return parent.apply_weights(None, layer, x).to(out_dtype)  # type: ignore[attr-defined, no-any-return]

    return row_major
