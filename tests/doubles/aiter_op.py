"""``torch.ops.aiter.gemm_a8w8_blockscale_bpreshuffle`` with AITER's schema (section 6 (a))."""

from collections.abc import Callable

import torch

from .aiter_api import Api
from .aiter_spec import GEMM

SCHEMA = (
    f"{GEMM}(Tensor(a0!) XQ, Tensor(a1!) WQ, Tensor(a2!) x_scale, Tensor(a3!) w_scale, "
    "ScalarType dtype=15, Tensor(a5!)? out=None) -> Tensor"
)

_library: torch.library.Library | None = None


def _fake(XQ, WQ, x_scale, w_scale, dtype=torch.bfloat16, out=None):
    return out if out is not None else XQ.new_empty((XQ.shape[0], WQ.shape[0]), dtype=dtype)


def register(current_api: Callable[[], Api]) -> None:
    """Once per process: compiled graphs keep the overload, so later doubles reuse it and
    the implementation asks ``current_api`` at each call which one is installed."""
    global _library
    if _library is not None:
        return

    def run(XQ, WQ, x_scale, w_scale, dtype=torch.bfloat16, out=None):
        return current_api().gemm(XQ, WQ, x_scale, w_scale, dtype, out)

    library = torch.library.Library("aiter", "FRAGMENT")
    library.define(SCHEMA)
    for key in ("CPU", "CUDA"):
        library.impl(GEMM, run, key)
    torch.library.register_fake(f"aiter::{GEMM}", _fake, lib=library)
    _library = library


def unregister() -> None:
    """As if no AITER had ever been imported in this process."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return getattr(torch.ops.aiter, GEMM)(XQ, WQ, x_scale, w_scale, dtype=dtype, out=out)
