"""The one op that every linear of our kernel class traces to.

vLLM reloads compiled graphs without asking which kernel traced them. A graph that only
ever contains ``vllm_rocm_mxfp8::linear`` cannot meet the wrong layout: the op looks at
the weight it is given, each time. It is opaque to the compiler, so kernel choice by M
happens at run time, not at trace time.
"""

from collections.abc import Callable

import torch

from vllm_rocm_mxfp8 import envs, layout, process, reference
from vllm_rocm_mxfp8.compat import aiter

Gemm = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor
]
"""``(x_q [M, K], x_scale [M, K/32], weight, weight_scale, out_dtype) -> [M, N]``"""

RowMajor = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
"""``(x [M, K], weight [N, K], weight_scale, out_dtype) -> [M, N]``"""

_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_FLOATING = (torch.bfloat16, torch.float16, torch.float32)

_row_major: RowMajor = reference.linear
_row_major_block32: Gemm | None = None
_aiter_checked = False


def set_row_major(plain: RowMajor, block32: Gemm | None = None) -> None:
    """Choose who serves two-dimensional weights: on ROCm vLLM's own kernels. ``block32``
    takes quantized inputs to weights with 32x32 scale blocks."""
    global _row_major, _row_major_block32
    _row_major, _row_major_block32 = plain, block32


def forget_backend() -> None:
    """Look again whether AITER can serve; for tests that change the machine."""
    global _aiter_checked
    _aiter_checked = False


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
        out = _row_major_linear(x2d, x_scale, weight, weight_scale, out_dtype)
    return out.reshape(shape)


def _row_major_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if x_scale is not None:
        if _row_major_block32 is not None and weight_scale.shape[0] != weight.shape[0]:
            return _row_major_block32(x.contiguous(), x_scale, weight, weight_scale, out_dtype)
        x = reference.dequantize(x, x_scale, torch.float32).to(out_dtype)
    return _row_major(x, weight, weight_scale, out_dtype)


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
    global _aiter_checked
    if _aiter_checked:
        return _aiter_gemm
    verdict = process.verdict()
    if verdict.ok:
        # Facts of the process; asking them again at every launch would cost as much.
        _aiter_checked = True
        return _aiter_gemm
    raise RuntimeError(
        "this weight is preshuffled, but no backend of this process reads that layout "
        f"(VLLM_ROCM_MXFP8_BACKEND={backend}: {verdict.text}). It was processed by a process "
        "with other settings: give both the same VLLM_ROCM_MXFP8* variables, or load the "
        "weights again."
    )


def _aiter_gemm(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    library = aiter.probe()
    if isinstance(library, str):
        raise RuntimeError(library)
    rows, columns, _ = weight.shape
    # AITER takes its E8M0 route by dtype and by rank: uint8 scales, or flat ones, would be
    # read as something else. It computes bfloat16 only.
    out = library.gemm(
        x_q.contiguous(),
        weight.view(rows * 16, columns * 32),
        x_scale.contiguous().view(torch.float8_e8m0fnu),
        weight_scale.view(torch.float8_e8m0fnu),
        dtype=torch.bfloat16,
    )
    return out.to(out_dtype)


# FRAGMENT and the check: the module may be executed again in one process (tests, reload).
_library = torch.library.Library("vllm_rocm_mxfp8", "FRAGMENT")
if not hasattr(torch.ops.vllm_rocm_mxfp8, "linear"):
    _library.define(
        "linear(Tensor x, Tensor? x_scale, Tensor weight, Tensor weight_scale, "
        "SymInt n, SymInt k, ScalarType out_dtype) -> Tensor"
    )
    _library.impl("linear", linear, "CompositeExplicitAutograd")
    torch.library.register_fake("vllm_rocm_mxfp8::linear", _linear_fake, lib=_library)
