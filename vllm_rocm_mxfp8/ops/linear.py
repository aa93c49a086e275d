"""The one op that every linear of our kernel class traces to.

vLLM reloads compiled graphs without asking which kernel traced them. A graph that only
ever contains ``vllm_rocm_mxfp8::linear`` cannot meet the wrong layout: the op looks at
the weight it is given, each time. It is opaque to the compiler, so kernel choice by M
happens at run time, not at trace time.
"""

from collections.abc import Callable

import torch

from vllm_rocm_mxfp8 import envs, layout, reference

Gemm = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor
]
"""``(x_q [M, K], x_scale [M, K/32], weight, weight_scale, out_dtype) -> [M, N]``"""

RowMajor = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
"""``(x [M, K], weight [N, K], weight_scale, out_dtype) -> [M, N]``"""

_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_FLOATING = (torch.bfloat16, torch.float16, torch.float32)

_row_major: RowMajor = reference.linear


def set_row_major(function: RowMajor) -> None:
    """Choose who serves two-dimensional weights: on ROCm vLLM's own kernel."""
    global _row_major
    _row_major = function


def linear(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    n: int,
    k: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """MXFP8 linear without bias.

    x: [..., K], any strides. With ``x_scale`` None: bf16, fp16 or fp32, quantized here;
    otherwise float8_e4m3fn with row-major E8M0 scales [M, K/32] (M: product of x's
    leading dimensions). weight: [N/16, K/32, 512] float8_e4m3fn (preshuffled) or [N, K];
    weight_scale: [N/32, K/32] or [N, K/32] uint8. n, k: N and K of the layer. Returns a
    contiguous [..., N] tensor of ``out_dtype``. No rows: an empty result, no launch.
    Raises ValueError for shapes that do not fit, TypeError for a dtype, RuntimeError for
    a preshuffled weight that no backend of this process can read.
    """
    _check(x, x_scale, weight, weight_scale, k)
    rows = x.numel() // k
    if x_scale is not None and (
        tuple(x_scale.shape) != (rows, k // 32) or x_scale.dtype not in _E8M0
    ):
        raise ValueError(
            f"x_scale must be row-major [{rows}, {k // 32}] uint8 or float8_e8m0fnu, "
            f"got {list(x_scale.shape)} {x_scale.dtype}"
        )
    shape = (*x.shape[:-1], n)
    if x.numel() == 0:
        return x.new_empty(shape, dtype=out_dtype)
    x2d = x.reshape(-1, k)
    if layout.is_preshuffled(weight):
        if tuple(weight.shape) != (n // 16, k // 32, layout.TILE_BYTES):
            raise ValueError(
                f"preshuffled weight of an N={n}, K={k} linear must be "
                f"[{n // 16}, {k // 32}, {layout.TILE_BYTES}], got {list(weight.shape)}"
            )
        gemm = _gemm()
        x_q, x_q_scale = (x2d, x_scale) if x_scale is not None else reference.quantize(x2d)
        out = gemm(x_q, x_q_scale, weight, weight_scale, out_dtype)
    else:
        if weight.shape != (n, k):
            raise ValueError(f"a row-major weight must be [{n}, {k}], got {list(weight.shape)}")
        if x_scale is not None:
            x2d = reference.dequantize(x2d, x_scale, torch.float32).to(out_dtype)
        out = _row_major(x2d, weight, weight_scale, out_dtype)
    return out.reshape(shape)


def _linear_fake(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    n: int,
    k: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    _check(x, x_scale, weight, weight_scale, k)
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)


def _check(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    k: int,
) -> None:
    if x.ndim == 0 or x.shape[-1] != k:
        raise ValueError(f"the input of a K={k} linear must be [..., {k}], got {list(x.shape)}")
    if x_scale is None and x.dtype not in _FLOATING:
        raise TypeError(
            f"input dtype {x.dtype} without scales: expected bfloat16, float16 or float32"
        )
    if x_scale is not None and x.dtype != torch.float8_e4m3fn:
        raise TypeError(f"a quantized input must be float8_e4m3fn, got {x.dtype}")
    # vLLM's ROCm kernel keeps some row-major weights dequantized; preshuffled are bytes.
    wide = weight.ndim == 2 and weight.dtype in _FLOATING
    if weight.dtype != torch.float8_e4m3fn and not wide:
        raise TypeError(f"an MXFP8 weight must be float8_e4m3fn, got {weight.dtype}")
    if weight_scale.dtype not in _E8M0:
        raise TypeError(
            f"weight_scale must be uint8 or float8_e8m0fnu, got {weight_scale.dtype}"
        )


def _gemm() -> Gemm:
    backend = envs.backend()
    if backend == "reference":
        return reference.gemm
    raise RuntimeError(
        "this weight is preshuffled, but no backend of this process reads that layout "
        f"(VLLM_ROCM_MXFP8_BACKEND={backend}). It was processed by a process with other "
        "settings: give both the same VLLM_ROCM_MXFP8* variables, or load the weights again."
    )


# FRAGMENT and the check: the module may be executed again in one process (tests, reload).
_library = torch.library.Library("vllm_rocm_mxfp8", "FRAGMENT")
if not hasattr(torch.ops.vllm_rocm_mxfp8, "linear"):
    _library.define(
        "linear(Tensor x, Tensor? x_scale, Tensor weight, Tensor weight_scale, "
        "SymInt n, SymInt k, ScalarType out_dtype) -> Tensor"
    )
    _library.impl("linear", linear, "CompositeExplicitAutograd")
    torch.library.register_fake("vllm_rocm_mxfp8::linear", _linear_fake, lib=_library)
