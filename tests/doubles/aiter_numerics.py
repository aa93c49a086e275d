"""The arithmetic of AITER's MXFP8 GEMM, from the contract page alone.

Independent of ``vllm_rocm_mxfp8.reference`` on purpose: the two are compared, so neither
may import the other.
"""

from dataclasses import dataclass

import torch

# Outside this band of scale bytes a dequantized value or a product can leave float32.
_SAFE_LOW, _SAFE_HIGH = 127 - 40, 127 + 40
_CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Blocks:
    """Rows x columns that share one scale. x_columns: 32 or 128 (one row each)."""

    x_columns: int
    w_rows: int
    w_columns: int
    x_transposed: bool = False


def shuffle(weight: torch.Tensor) -> torch.Tensor:
    """[.., N, K] of one-byte elements -> same shape and dtype, (16,16)-shuffled bytes."""
    k = weight.shape[-1]
    tiles = weight.view(torch.uint8).view(-1, 16, k // 32, 2, 16)
    moved = tiles.permute(0, 2, 3, 1, 4).contiguous()
    return moved.view(weight.shape).view(weight.dtype)


def unshuffle(weight: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`shuffle` for [N, K]; any 16-row slice can be undone on its own."""
    n, k = weight.shape
    tiles = weight.view(torch.uint8).view(n // 16, k // 32, 2, 16, 16)
    return tiles.permute(0, 3, 1, 2, 4).reshape(n, k)


def _e8m0(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E8M0 bytes (OCP MX v1.0): 2^(s - 127); 0 is 2^-127, 254 is 2^127, 255 is NaN."""
    byte = scale.view(torch.uint8).to(torch.float64)
    return torch.where(byte == 255, torch.nan, torch.exp2(byte - 127)).to(dtype)


def _scaled(data: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[R, K] e4m3 bytes times one scale per rows x columns block; the scale's type out."""
    values = data.view(torch.float8_e4m3fn).to(scale.dtype)
    per_row = scale.repeat_interleave(rows, 0)[: data.shape[0]]
    blocks = values.view(data.shape[0], -1, columns)
    return blocks.mul_(per_row.unsqueeze(-1)).view(values.shape)


def gemm(
    xq: torch.Tensor,
    wq: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    blocks: Blocks,
    *,
    shuffled: bool = True,
    fault: str | None = None,
) -> torch.Tensor:
    """[M, K] e4m3 x [N, K] e4m3 -> [M, N] float32, before any rounding to the output type.

    x_scale [M, K/x_columns], w_scale [ceil(N/w_rows), K/w_columns], both E8M0 (or uint8)
    and contiguous. Accumulates in float32; in float64 when a scale byte is so far out that
    a single dequantized operand could overflow, as the hardware scales products instead.
    """
    bytes_ = torch.cat([s.view(torch.uint8).flatten() for s in (x_scale, w_scale)])
    finite = bytes_[bytes_ != 255]
    safe = bool(((finite >= _SAFE_LOW) & (finite <= _SAFE_HIGH)).all())
    dtype = torch.float32 if safe else torch.float64

    m, k = xq.shape
    n = wq.shape[0]
    xs, ws = _e8m0(x_scale, dtype), _e8m0(w_scale, dtype)
    if blocks.x_transposed:
        xs = xs.reshape(-1).view(k // blocks.x_columns, m).t()
    if fault == "swapped_scale":
        ws = ws.reshape(ws.shape[1], ws.shape[0]).t()

    x = _scaled(xq.contiguous(), xs, 1, blocks.x_columns)
    y = torch.empty(m, n, dtype=torch.float32, device=xq.device)
    step = max(128, _CHUNK_ELEMENTS // k // 128 * 128)
    for first in range(0, n, step):
        rows = wq[first : first + step]
        if shuffled and fault != "unshuffled":
            rows = unshuffle(rows)
        scale = ws[first // blocks.w_rows : -(-(first + step) // blocks.w_rows)]
        w = _scaled(rows.contiguous(), scale, blocks.w_rows, blocks.w_columns)
        y[:, first : first + step] = x @ w.t()
    return y


def widened(
    xq: torch.Tensor, wq: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    """What AITER before the E8M0 lookup computes from 32-wide scales: [M, N], wrong.

    It converts the scales to float32 and runs its 1x128 / 128x128 kernel, which reads the
    first bytes of each buffer as column-major [K/128, M] and row-major [N/128, K/128].
    """
    m, k = xq.shape
    n = wq.shape[0]
    columns, rows = -(-k // 128), -(-n // 128)
    xs = _e8m0(x_scale, torch.float32).flatten()[: m * columns].view(columns, m).t()
    ws = _e8m0(w_scale, torch.float32).flatten()[: rows * columns].view(rows, columns)
    x = xq.view(torch.float8_e4m3fn).float() * xs.repeat_interleave(128, 1)[:, :k]
    w = unshuffle(wq).view(torch.float8_e4m3fn).float()
    w *= ws.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return x @ w.t()
