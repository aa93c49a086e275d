"""Weight layout: the (16,16) preshuffle as a three-dimensional tensor, and scale blocks.

A preshuffled weight is ``[N/16, K/32, 512]``: one 512-byte row per tile of 16 weight
rows x 32 columns. Inside a tile the two 16-byte halves of the columns come first, then
the 16 rows, then the 16 bytes of a half, which is the order in which a gfx950 wave
loads MFMA operands with 16-byte loads (AITER's ``shuffle_weight(layout=(16, 16))``).
The number of dimensions is the record of the layout: it survives IPC, deepcopy, reload
and torch.compile, where a Python attribute does not, and code that does not know the
layout fails on it instead of computing garbage.
"""

import torch

from vllm_rocm_mxfp8.capability import TILE_K, TILE_N

TILE_BYTES = TILE_N * TILE_K
_HALF = 16


def shuffle(weight: torch.Tensor) -> torch.Tensor:
    """Preshuffle a row-major weight.

    weight: [N, K], any one-byte dtype, N % 16 == 0 and K % 32 == 0, any strides.
    Returns a new contiguous [N/16, K/32, 512] tensor of the same dtype and device, and
    allocates nothing else. Raises ValueError otherwise.
    """
    if weight.ndim != 2:
        raise ValueError(
            f"shuffle expects a row-major [N, K] weight, got shape {tuple(weight.shape)}"
            + (" (already preshuffled?)" if weight.ndim == 3 else "")
        )
    _check_one_byte(weight)
    n, k = weight.shape
    if n == 0 or k == 0 or n % TILE_N or k % TILE_K:
        raise ValueError(
            f"shuffle needs N % {TILE_N} == 0 and K % {TILE_K} == 0, got N={n}, K={k}"
        )
    raw = weight.view(torch.uint8)
    tiles = raw.unflatten(1, (k // TILE_K, 2, _HALF)).unflatten(0, (n // TILE_N, TILE_N))
    out = torch.empty(
        (n // TILE_N, k // TILE_K, TILE_BYTES), dtype=torch.uint8, device=weight.device
    )
    out.view(n // TILE_N, k // TILE_K, 2, TILE_N, _HALF).copy_(tiles.permute(0, 2, 3, 1, 4))
    return out.view(weight.dtype)


def unshuffle(weight: torch.Tensor) -> torch.Tensor:
    """Exact inverse of :func:`shuffle`: [N/16, K/32, 512] -> new contiguous [N, K].

    Raises ValueError for any other shape or a dtype wider than one byte.
    """
    if weight.ndim != 3 or weight.shape[2] != TILE_BYTES:
        raise ValueError(
            f"unshuffle expects [N/{TILE_N}, K/{TILE_K}, {TILE_BYTES}], "
            f"got shape {tuple(weight.shape)}"
        )
    _check_one_byte(weight)
    rows, cols, _ = weight.shape
    tiles = weight.view(torch.uint8).unflatten(2, (2, TILE_N, _HALF))
    out = torch.empty((rows * TILE_N, cols * TILE_K), dtype=torch.uint8, device=weight.device)
    out.view(rows, TILE_N, cols, 2, _HALF).copy_(tiles.permute(0, 3, 1, 2, 4))
    return out.view(weight.dtype)


def is_preshuffled(weight: torch.Tensor) -> bool:
    """Three dimensions mean preshuffled, two row-major. Anything else is an error."""
    if weight.ndim not in (2, 3):
        raise ValueError(
            f"an MXFP8 weight has 2 dimensions (row-major) or 3 (preshuffled), "
            f"got shape {tuple(weight.shape)}"
        )
    return weight.ndim == 3


def block_scale(weight_scale: torch.Tensor, declared_rows: int) -> tuple[torch.Tensor, bool]:
    """Scales in the block form that the checkpoint declares.

    weight_scale: [N, K/32] uint8, one row per weight row (vLLM's loader has expanded
    blocks). declared_rows: rows that share a scale according to the quantization config
    (32, or 1). Returns ``(scale, confirmed)``: [N/32, K/32] and True when 32 is declared
    and every row equals the first of its block; otherwise the contiguous [N, K/32] and
    ``declared_rows == 1``. The data alone never decides: dummy weights are uniform and
    would look like blocks.
    """
    n = weight_scale.shape[0]
    per_row = weight_scale.contiguous()
    if declared_rows == 1:
        return per_row, True
    if declared_rows != TILE_K or n % declared_rows:
        return per_row, False
    blocks = per_row.unflatten(0, (n // declared_rows, declared_rows))
    first = blocks[:, :1]
    if not bool((blocks == first).all()):
        return per_row, False
    return first.squeeze(1).contiguous(), True


def scale_block(weight_scale: torch.Tensor, n: int, k: int) -> str:
    """``32x32`` or ``1x32``, from the shape of a processed scale. ValueError otherwise."""
    shape = tuple(weight_scale.shape)
    if shape == (n, k // TILE_K):
        return "1x32"
    if n % 32 == 0 and shape == (n // 32, k // TILE_K):
        return "32x32"
    raise ValueError(
        f"scales of N={n} rows and K={k} columns must be [{n}, {k // TILE_K}] "
        f"or [{-(-n // 32)}, {k // TILE_K}], got {list(shape)}"
    )


def _check_one_byte(weight: torch.Tensor) -> None:
    if weight.element_size() != 1:
        raise ValueError(f"the preshuffle moves single bytes; {weight.dtype} is wider")
