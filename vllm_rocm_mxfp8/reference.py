"""Plain torch MXFP8 (OCP Microscaling Formats v1.0): the oracle of tests and benchmarks,
and the backend where there is no GPU kernel.

Elements are float8_e4m3fn, scales E8M0 bytes: byte s stands for 2^(s - 127), 255 for
NaN; one scale per 32 consecutive elements along K.
"""

import torch

from vllm_rocm_mxfp8 import layout
from vllm_rocm_mxfp8.capability import TILE_K

E4M3_MAX = 448.0
_ROWS_PER_CHUNK = 4096


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations to MXFP8.

    x: [..., K], bf16, fp16 or fp32, K % 32 == 0. Returns ``(x_q [..., K] float8_e4m3fn,
    x_scale [..., K/32] uint8)``. Scale byte = ceil(log2(amax / 448)) + 127 in 0..254:
    byte-equal to vLLM's ``_mxfp8_e4m3_quantize_torch``, whose float32 logarithm is part
    of the definition. Raises ValueError if K % 32 != 0.
    """
    k = x.shape[-1]
    if k % TILE_K:
        raise ValueError(f"MXFP8 needs K % {TILE_K} == 0, got K={k}")
    blocks = x.float().reshape(*x.shape[:-1], k // TILE_K, TILE_K)
    # The smallest normal number keeps log2 finite; such blocks get scale byte 0.
    amax = blocks.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
    exponent = (amax.div(E4M3_MAX).log2().ceil() + 127.0).clamp(0.0, 254.0)
    # Times the reciprocal: 2^-127, the divisor of an all-zero block, is a denormal that a
    # CPU set to flush would turn into 0 / 0. Both are powers of two, so both are exact.
    scaled = blocks * torch.exp2(127.0 - exponent).unsqueeze(-1)
    x_q = scaled.reshape(x.shape).to(torch.float8_e4m3fn)
    return x_q, exponent.to(torch.uint8)


def e8m0_to_float(scale: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values of E8M0 scales. scale: uint8 or float8_e8m0fnu, any shape. 0 is 2^-127 (a
    float32 denormal), 254 is 2^127, 255 is NaN."""
    table = torch.arange(-127.0, 129.0, dtype=torch.float64, device=scale.device).exp2()
    table[255] = torch.nan
    return table.to(dtype)[scale.view(torch.uint8).int()]


def dequantize(
    data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Values of an MXFP8 tensor.

    data: [R, K] float8_e4m3fn; scale: [R, K/32], or [R/32, K/32] for 32x32 blocks, uint8
    or float8_e8m0fnu. Returns [R, K] in ``dtype`` (float64 is exact for every byte).
    Raises ValueError if the shapes do not fit.
    """
    rows, k = data.shape
    if data.dtype != torch.float8_e4m3fn:
        raise ValueError(f"MXFP8 data must be float8_e4m3fn, got {data.dtype}")
    if layout.scale_block(scale, rows, k) == "32x32":
        # As bytes: float8_e8m0fnu has hardly any kernels.
        scale = scale.view(torch.uint8).repeat_interleave(TILE_K, dim=0)
    values = data.to(dtype).unflatten(1, (k // TILE_K, TILE_K))
    return (values * e8m0_to_float(scale, dtype).unsqueeze(-1)).flatten(1)


def gemm(
    x_q: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``x @ weight.T`` on MXFP8 operands, summed in float64 and rounded once.

    x_q: [M, K] float8_e4m3fn, x_scale: [M, K/32]; weight: [N, K] row-major or
    [N/16, K/32, 512] preshuffled, float8_e4m3fn; weight_scale: [N/32, K/32] (32x32
    blocks) or [N, K/32] (1x32). Scales uint8 or float8_e8m0fnu. Returns [M, N] in
    ``out_dtype``. A NaN scale reaches only the row or columns that it belongs to.
    """
    if layout.is_preshuffled(weight):
        weight = layout.unshuffle(weight)
    n, k = weight.shape
    m = x_q.shape[0]
    if x_q.shape[1] != k:
        raise ValueError(f"x has K={x_q.shape[1]}, the weight K={k}")
    rows_per_scale = 32 if layout.scale_block(weight_scale, n, k) == "32x32" else 1
    out = torch.empty((m, n), dtype=out_dtype, device=x_q.device)
    if m == 0:
        return out
    if tuple(x_scale.shape) != (m, k // TILE_K):
        raise ValueError(f"x_scale must be [{m}, {k // TILE_K}], got {list(x_scale.shape)}")
    x = dequantize(x_q, x_scale)
    for start in range(0, n, _ROWS_PER_CHUNK):
        stop = min(start + _ROWS_PER_CHUNK, n)
        w = dequantize(
            weight[start:stop],
            weight_scale[start // rows_per_scale : -(-stop // rows_per_scale)],
        )
        out[:, start:stop] = (x @ w.T).to(out_dtype)
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """MXFP8 linear without bias: quantize ``x`` [M, K], then :func:`gemm`. The result has
    ``out_dtype``, by default x's."""
    x_q, x_scale = quantize(x)
    return gemm(x_q, x_scale, weight, weight_scale, out_dtype or x.dtype)
