"""The Python surface of AITER that a caller may touch, behaving as the contract page says.

:class:`Api` is one AITER of one generation. It knows nothing of modules and installation
(``aiter_double``). Section numbers in comments are those of the contract page.
"""

import functools
import logging
import os
from collections.abc import Callable

import torch

from . import aiter_numerics as numerics
from . import aiter_table as tables
from .aiter_spec import GEMM, Call, SilentlyWrong, Spec, import_error

TABLE_VARIABLE = "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_MXSCALE_BPRESHUFFLE"

_E8M0 = torch.float8_e8m0fnu
_I32_BYTES = 2**31
_SPLIT_COUNTERS = 65536
_BLOCKS = ("32x32", "128x128", "1x32", "1x128")


def shuffle_weight(
    x: torch.Tensor,
    layout: tuple[int, int] = (16, 16),
    use_int4: bool = False,
    is_guinterleave: bool = False,
    gate_up: bool = False,
    pad_k_to: int = 0,
) -> torch.Tensor:
    """[.., N, K] one-byte -> same shape, (16,16)-shuffled, ``is_shuffled`` set (1.6)."""
    if layout != (16, 16) or use_int4 or is_guinterleave or gate_up or pad_k_to:
        raise NotImplementedError("the double shuffles with the default arguments only")
    if x.element_size() != 1:
        raise NotImplementedError("the double shuffles one-byte elements only")
    for size, tile in ((x.shape[-2], 16), (x.shape[-1], 32)):
        assert size % tile == 0, f"{size} % {tile} == {size % tile}"
    out = numerics.shuffle(x)
    out.is_shuffled = True
    return out


def mxscale_w_scale_block(shape: tuple[int, ...], n: int, k: int) -> str:
    """``"32x32"`` and the like from w_scale's shape; ValueError (1.2)."""
    n_blocks, k_blocks = shape
    if min(n_blocks, k_blocks) > 0 and n % n_blocks == 0 and k % k_blocks == 0:
        block = f"{n // n_blocks}x{k // k_blocks}"
        if block in _BLOCKS:
            return block
    raise ValueError(f"w_scale {tuple(shape)} has no block of {_BLOCKS} for N={n} K={k}")


def _is_group32(m: int, n: int, k: int, x_scale: torch.Tensor, w_scale: torch.Tensor) -> bool:
    return (
        {x_scale.dtype, w_scale.dtype} <= {_E8M0, torch.uint8}
        and x_scale.shape == (m, k // 32)
        and w_scale.shape in ((n, k // 32), (-(-n // 32), k // 32))
    )


class Api:
    """One simulated AITER. record: called with every :class:`Call`."""

    def __init__(self, spec: Spec, record: Callable[[Call], None]):
        self.spec = spec
        self.record = record
        self.logger = logging.getLogger("aiter")
        self._make_lookup()

    # --- 1.1, tuned table ---------------------------------------------------------------

    def get_gfx(self) -> str:
        """Honours GPU_ARCHS; the table's key does not."""
        named = os.environ.get("GPU_ARCHS", "native").split(";")[-1]
        return self.spec.gfx if named == "native" else named

    def get_gfx_runtime(self) -> str:
        return self.spec.gfx

    def get_cu_num(self) -> int:
        return int(os.environ.get("CU_NUM") or self.spec.cu_num)

    def _load(self) -> dict[tables.Key, list[dict]]:
        spec = self.spec
        if spec.broken == "csv":
            raise ValueError("DataFrame index must be unique for orient='index'.")
        if TABLE_VARIABLE in os.environ:
            paths = os.environ[TABLE_VARIABLE].split(":")
        else:
            paths = [spec.table or ""]
        table = tables.load_table(path for path in paths if path)
        for m, n, k, *kernel in spec.rows_1x32:
            name = kernel[0] if kernel else tables.pick_kernel(m, n, k, w_n=1)
            splits = tables.parse_name(name, swizzle_digits=True).splits
            row = dict(
                zip(tables.KERNEL_COLUMNS, ("flydsl", "bmm", splits, 1.0, name), strict=True)
            )
            row |= dict.fromkeys(tables.UNMEASURED, 0.0)
            table.setdefault((spec.gfx, spec.cu_num, m, n, k, "1x32"), []).append(row)
        return table

    def _rows(self, bmm: bool | None) -> dict[tables.Key, dict]:
        """One row per key. bmm None: every row, which v1 does."""
        chosen: dict[tables.Key, dict] = {}
        for key, rows in self._load().items():
            for row in rows:
                is_bmm = (row["libtype"], row["kernelId"]) == ("flydsl", "bmm")
                if bmm is not None and bmm != is_bmm:
                    continue
                if key in chosen:
                    raise ValueError("DataFrame index must be unique for orient='index'.")
                chosen[key] = row
        return chosen

    def _find(self, rows, m: int, n: int, k: int, block: str, untuned: str) -> dict | None:
        if self.spec.broken == "lookup_raises":
            raise RuntimeError("Get GPU arch from rocminfo failed")
        gfx, cu_num = self.get_gfx_runtime(), self.get_cu_num()
        for padded in tables.padded_m(m, n):
            row = rows().get((gfx, cu_num, padded, n, k, block))
            if row is not None:
                if os.environ.get("AITER_LOG_TUNED_CONFIG"):
                    self.logger.info(f"M:{m}, N:{n}, K:{k}, w_scale {block} is tuned: {row}")
                return row
        self.logger.warning(untuned)
        return None

    def _make_lookup(self) -> None:
        """The lookup of this generation, with the caches a caller can see."""
        if self.spec.generation == "v1":

            @functools.cache
            def _load_mxscale_bpreshuffle_tuned():
                return self._rows(None)

            @functools.lru_cache(1024)
            def get_mxscale_bpreshuffle_config(m, n, k, w_scale_block):
                text = (
                    f"mxscale bpreshuffle M:{m}, N:{n}, K:{k}, w_scale {w_scale_block} is "
                    f"untuned on {self.spec.gfx}; the flydsl batched GEMM heuristic picks "
                    "its kernel."
                )
                load = _load_mxscale_bpreshuffle_tuned
                return self._find(load, m, n, k, w_scale_block, text)

        else:

            @functools.cache
            def _load_mxscale_bpreshuffle_tuned(bmm):
                return self._rows(bool(bmm))

            @functools.lru_cache(1024)
            def get_mxscale_bpreshuffle_config(m, n, k, w_scale_block, bmm):
                text = (
                    f"mxscale bpreshuffle ({'bmm' if bmm else 'gemm'}) M:{m}, N:{n}, K:{k}, "
                    f"w_scale {w_scale_block} is untuned on {self.spec.gfx}; a heuristic "
                    "picks the kernel."
                )
                load = functools.partial(_load_mxscale_bpreshuffle_tuned, bmm)
                return self._find(load, m, n, k, w_scale_block, text)

        self.load_tuned = _load_mxscale_bpreshuffle_tuned
        self.get_config = get_mxscale_bpreshuffle_config

    # --- 1.2, the GEMM and its routes ---------------------------------------------------

    def _recorded(self, op: str, tensors, dtype, run: Callable[[dict], torch.Tensor]):
        """Runs ``run(note)``, which notes what it finds out, and records the call."""
        xq, wq = tensors[:2]
        note: dict = {"path": ""}
        try:
            return run(note)
        except BaseException as error:
            note["error"] = f"{type(error).__name__}: {error}"
            note["launched"] = False
            raise
        finally:
            self.record(
                Call(
                    op=op,
                    m=xq.shape[0],
                    n=wq.shape[0],
                    k=xq.shape[-1],
                    shapes=tuple(tuple(t.shape) for t in tensors),
                    dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
                    out_dtype=str(dtype).removeprefix("torch."),
                    **note,
                )
            )

    def gemm(self, xq, wq, x_scale, w_scale, dtype=torch.bfloat16, out=None) -> torch.Tensor:
        """Implementation of ``aiter::gemm_a8w8_blockscale_bpreshuffle``."""
        tensors = (xq, wq, x_scale, w_scale)
        return self._recorded(
            GEMM, tensors, dtype, lambda note: self._gemm(note, *tensors, dtype, out)
        )

    def _gemm(self, note, xq, wq, x_scale, w_scale, dtype, out):
        m, n, k = xq.shape[0], wq.shape[0], xq.shape[-1]
        assert dtype in (torch.bfloat16, torch.float16), f"unsupported output dtype {dtype}"
        if out is not None:
            assert tuple(out.shape) == (m, n), f"out {tuple(out.shape)} is not {(m, n)}"
            assert out.dtype == dtype, f"out is {out.dtype}, not {dtype}"
            assert out.device == xq.device, f"out is on {out.device}, not {xq.device}"
        result = torch.empty(m, n, dtype=dtype, device=xq.device) if out is None else out

        if not (x_scale.dtype == _E8M0 and w_scale.dtype == _E8M0):
            note["path"] = "fp32"
            if x_scale.dtype == w_scale.dtype == torch.float32:
                raise NotImplementedError("the double does not model FP32 scales")
            raise SilentlyWrong(
                f"scales {x_scale.dtype}/{w_scale.dtype} are not float8_e8m0fnu: AITER takes "
                "its FP32-scale kernel, which the double does not model"
            )
        if self.spec.generation == "old":
            note |= {"path": "widened", "launched": m > 0}
            return result.copy_(numerics.widened(xq, wq, x_scale, w_scale)) if m else result
        if self.get_gfx() != "gfx950":
            raise NotImplementedError(f"the double models gfx950 only, not {self.get_gfx()}")
        if self.spec.generation == "v2" and x_scale.dim() == 1 and w_scale.dim() == 1:
            note["path"] = "mxpsh"
            if n % 128 or k % 128:
                raise RuntimeError(f"no legal gfx950 MX tile for M={m} N={n} K={k}")
            raise SilentlyWrong("1-D scales are read in the shuffled mxpsh layout")

        note["path"] = "bmm"
        transposed = k // x_scale.shape[-1] == 128
        block = note["w_scale_block"] = mxscale_w_scale_block(tuple(w_scale.shape), n, k)
        key = (m, n, k, block)
        row = (
            self.get_config(*key)
            if self.spec.generation == "v1"
            else self.get_config(*key, True)
        )
        if row is not None and (row["libtype"], row["kernelId"]) != ("flydsl", "bmm"):
            raise NotImplementedError(
                f"tuned row {row['libtype']}/{row['kernelId']} is not bmm"
            )
        x3, w3, out3 = xq.view(m, 1, k), wq.view(1, n, k), result.view(m, 1, n)
        name = row["kernelName"] if row else None
        if self._bmm(note, x3, w3, out3, x_scale, w_scale, block, transposed, name):
            w_rows, w_columns = (int(edge) for edge in block.split("x"))
            blocks = numerics.Blocks(k // x_scale.shape[-1], w_rows, w_columns, transposed)
            result.copy_(numerics.gemm(xq, wq, x_scale, w_scale, blocks, fault=self.spec.fault))
        return result

    # --- 1.3, the batched kernel with B = 1 ---------------------------------------------

    def _runners(self) -> set[tuple[str, bool]]:
        """(w_scale block, column-major x_scale) that some kernel module is listed for."""
        self.import_flydsl()
        gfx = self.get_gfx()
        if gfx == "gfx1250":
            return {("128x128", False)}
        if gfx != "gfx950":
            return set()
        one_row = {("1x32", False)} if self.spec.supports_1x32 else set()
        return {("32x32", False), ("128x128", False), ("128x128", True)} | one_row

    def import_flydsl(self) -> None:
        if self.spec.broken == "flydsl":
            raise import_error("ImportError")

    def bmm_a8w8_mxfp8_supported(self, block: str, transposed: bool, /) -> bool:
        return (block, bool(transposed)) in self._runners()

    def _bmm(self, note, x3, w3, out3, x_scale, w_scale, block, transposed, name) -> bool:
        """Validates, chooses the kernel; False when there is nothing to launch."""
        m, n, k = x3.shape[0], w3.shape[1], x3.shape[2]
        if (block, transposed) not in self._runners():
            layout = "column-major" if transposed else "row-major"
            raise NotImplementedError(
                f"no preshuffled mxfp8 BMM kernel reads a {block} w_scale with a {layout} "
                f"x_scale on {self.get_gfx()}"
            )
        x_columns = k // x_scale.shape[-1]
        w_rows, w_columns = (int(edge) for edge in block.split("x"))

        def need(ok: bool, text: str) -> None:
            if not ok:
                raise RuntimeError(text)

        need(w3.shape[2] == k, f"shape mismatch: XQ has K={k}, WQ has K={w3.shape[2]}")
        need(x3.element_size() == 1 and w3.element_size() == 1, "XQ/WQ element_size must be 1")
        need(out3.dtype == torch.bfloat16, "Out must be bf16")
        dense = all(t.is_contiguous() for t in (x3, w3, out3))
        need(dense, "XQ/WQ/Out must be contiguous")
        expected = (m, k // x_columns)
        need(
            tuple(x_scale.shape) == expected,
            f"x_scale shape {tuple(x_scale.shape)} must be {expected}",
        )
        for name_, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
            need(scale.is_contiguous(), f"{name_} must be contiguous")
        need(x_columns in (32, 128), f"x_scale edge {x_columns} is not allowed")
        need(max(m, n) * k < _I32_BYTES, f"M={m} N={n} K={k} overflows the i32 byte offsets")
        one_row = self.spec.supports_1x32 is True
        need(w_rows != 1 or one_row, f"w_scale rows {w_rows}: not a (32,128) block")
        if m == 0:
            return False

        if name is None:
            name = tables.pick_kernel(m, n, k, x_columns, w_rows, w_columns, one_row)
        else:
            note["tuned"] = True
        note["kernel"] = name
        config = self.check_kernel(name, n, k, block, x_columns)
        tiles = -(-m // config.tile_m) * (n // config.tile_n)
        need(
            config.splits == 1 or tiles <= _SPLIT_COUNTERS,
            f"{tiles} split-K tiles exceed {_SPLIT_COUNTERS} counters",
        )
        note["launched"] = True
        return True

    def check_kernel(
        self, name: str, n: int, k: int, block: str, x_columns: int
    ) -> tables.Config:
        """The parsed name; ValueError when it is unknown or cannot run this shape."""
        w_rows, w_columns = (int(edge) for edge in block.split("x"))
        one_row = self.spec.supports_1x32 is True
        config = tables.parse_name(name, swizzle_digits=self.spec.generation == "v2")
        tables.check_config(
            config, n, k, x_k=x_columns, w_n=w_rows, w_k=w_columns, one_row=one_row
        )
        return config

    # --- 1.5, the entry point that takes uint8 ------------------------------------------

    def gemm_a8w8_blockscale(
        self, XQ, WQ, x_scale, w_scale, dtype=torch.bfloat16, isBpreshuffled=False, split_k=None
    ) -> torch.Tensor:
        tensors = (XQ, WQ, x_scale, w_scale)
        m, n, k = XQ.shape[0], WQ.shape[0], XQ.shape[-1]
        group32 = self.spec.generation == "v2" and _is_group32(m, n, k, x_scale, w_scale)
        if group32 and isBpreshuffled:
            assert split_k is None, "split_k is not supported with isBpreshuffled"
            scales = (x_scale.view(_E8M0), w_scale.view(_E8M0))
            return getattr(torch.ops.aiter, GEMM)(XQ, WQ, *scales, dtype=dtype)

        def run(note):
            if not group32:
                note["path"] = "fp32"
                float_scales = x_scale.dtype == w_scale.dtype == torch.float32
                assert float_scales, "Expected E8M0 group32 scale shapes or FP32 scales"
                raise NotImplementedError("the double does not model FP32 scales")
            note |= {"path": "group32", "launched": m > 0}
            blocks = numerics.Blocks(32, 1 if w_scale.shape[0] == n else 32, 32)
            y = numerics.gemm(*tensors, blocks, shuffled=False, fault=self.spec.fault)
            return y.to(dtype)

        return self._recorded("gemm_a8w8_blockscale", tensors, dtype, run)

    # --- section 4 and 5, for warmup and prebuild ---------------------------------------

    def pick_bmm_kernel_name(
        self, b, m, n, k, x_scale_k=32, w_scale_n=32, w_scale_k=32, x_scale_transposed=False
    ) -> str:
        one_row = self.spec.supports_1x32 is True
        return tables.pick_kernel(m, n, k, x_scale_k, w_scale_n, w_scale_k, one_row)
