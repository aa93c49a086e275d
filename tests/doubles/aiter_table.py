"""AITER's tuned table, M padding, kernel names and heuristic, from contract sections 1-4."""

import csv
import functools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Key = tuple[str, int, int, int, int, str]
"""gfx, cu_num, padded M, N, K, w_scale_block."""

KERNEL_COLUMNS = ("libtype", "kernelId", "splitK", "us", "kernelName")
UNMEASURED = ("tflops", "bw", "errRatio")
"""Columns of a looked-up row which the project's copy of the table does not carry."""


def next_pow2(m: int) -> int:
    return 1 << max(0, m - 1).bit_length()


def padded_m(m: int, n: int) -> Iterator[int]:
    """M values under which a row is looked for, in order (contract section 2)."""
    yield m
    if m <= 256:
        step = 16
    elif m <= 1024:
        step = 32
    elif m <= 4096:
        step = 64
    else:
        step = 128
    yield -(-m // step) * step
    if m <= 4096:
        yield next_pow2(m)
    elif m <= 8192 or n > 4096:
        yield 8192
    else:
        yield next_pow2(m)


def load_table(paths: Iterable[str]) -> dict[Key, list[dict]]:
    """Rows by key, file order. KeyError or ValueError when a file is malformed."""
    table: dict[Key, list[dict]] = {}
    for path in paths:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                m, n, k = (int(row[name]) for name in "MNK")
                key = (row["gfx"], int(row["cu_num"]), m, n, k, row["w_scale_block"])
                entry = {name: row[name] for name in KERNEL_COLUMNS}
                entry["splitK"] = int(entry["splitK"])
                entry["us"] = float(entry["us"])
                entry |= {name: float(row.get(name) or 0) for name in UNMEASURED}
                table.setdefault(key, []).append(entry)
    return table


@dataclass(frozen=True)
class Config:
    """One kernel, as its name spells it. ahead 0: B goes through LDS as A does."""

    tile_m: int
    tile_n: int
    tile_k: int
    m_warp: int
    n_warp: int
    buffers: int
    splits: int = 1
    ahead: int = 0
    nt: bool = False
    xcd: bool = False
    swizzle: int = 0
    per_stage: bool = False

    @property
    def threads(self) -> int:
        return 64 * self.m_warp * self.n_warp

    @property
    def name(self) -> str:
        return (
            f"flydsl_bmm_mxfp8_mfma_t{self.tile_m}x{self.tile_n}x{self.tile_k}"
            f"_w{self.m_warp}x{self.n_warp}_nb{self.buffers}_sk{self.splits}"
            + (f"_bd{self.ahead}" if self.ahead else "")
            + ("_nt" if self.nt else "")
            + (f"_xcd{self.swizzle or ''}" if self.xcd else "")
            + ("_sps" if self.per_stage else "")
        )


_NAME = re.compile(
    r"flydsl_bmm_mxfp8_mfma_t(\d+)x(\d+)x(\d+)_w(\d+)x(\d+)_nb(\d+)_sk(\d+)"
    r"(?:_bd(\d+))?(_nt)?(_xcd(\d*))?(_sps)?"
)


def parse_name(name: str, *, swizzle_digits: bool) -> Config:
    """ValueError for a name this generation does not know. swizzle_digits: ``_xcd4`` is
    read; older parsers refuse it, so that names are not portable between versions."""
    match = _NAME.fullmatch(name)
    if match is None or (match[11] and not swizzle_digits):
        raise ValueError(f"unrecognised kernelName {name!r}")
    numbers = [int(value) for value in match.groups()[:7]]
    return Config(
        *numbers,
        ahead=int(match[8] or 0),
        nt=bool(match[9]),
        xcd=bool(match[10]),
        swizzle=int(match[11] or 0),
        per_stage=bool(match[12]),
    )


def lds_bytes(config: Config, k: int) -> int:
    """LDS arena. Fitted to the eleven kernels that section 7 of the contract measured."""
    stage = (config.tile_m + (0 if config.ahead else config.tile_n)) * config.tile_k
    w_scales = 4 * config.threads
    if config.per_stage:
        x_scales = config.tile_m * config.tile_k // 32
        rounded = -(-x_scales // w_scales) * w_scales
        return 16 + config.buffers * (stage + rounded + w_scales)
    own_k = -(-k // 128) * 128 // config.splits
    return 16 + config.buffers * stage + config.tile_m * own_k // 32 + w_scales


def check_config(
    config: Config, n: int, k: int, *, x_k: int, w_n: int, w_k: int, one_row: bool
) -> None:
    """ValueError with the first rule of section 1.4 that the kernel breaks on this shape.

    one_row: the kernel module knows one scale row per weight row (1x32)."""
    c = config
    padded_k = -(-k // 128) * 128
    edges = {32, 128}

    def threads_share(size: int) -> bool:
        return size % (16 * c.threads) == 0

    def need(ok: bool, rule: str) -> None:
        if not ok:
            raise ValueError(f"{c.name} cannot run N={n} K={k}: needs {rule}")

    need(k % 64 == 0, "K % 64 == 0")
    need(c.tile_m % (16 * c.m_warp) == 0, "tile_m % (16 * m_warp) == 0")
    need(c.tile_n % (16 * c.n_warp) == 0, "tile_n % (16 * n_warp) == 0")
    need(c.tile_k >= 128 and c.tile_k.bit_count() == 1, "tile_k a power of 2 from 128")
    need(c.buffers >= 2, "num_buffers >= 2")
    need(padded_k % (c.tile_k * c.splits) == 0, "ceil128(K) % (tile_k * splits) == 0")
    need(padded_k // c.splits // c.tile_k >= c.buffers - 1, "a K tile per buffer")
    need(x_k in edges and k % x_k == 0, "an x_scale edge of 32 or 128 that divides K")
    need(w_k in edges and k % w_k == 0, "a w_scale edge of 32 or 128 that divides K")
    need(w_n in (edges | {1} if one_row else edges), "w_scale rows of 32 or 128")
    need(n % c.tile_n == 0, "N % tile_n == 0")
    need(c.tile_n % w_n == 0 or w_n % c.tile_n == 0, "tile_n and w_scale rows to nest")
    need(threads_share(c.tile_m * c.tile_k), "A stages that split evenly over threads")
    if c.ahead:
        need(c.ahead <= c.buffers - 1, "b_ahead in [1, num_buffers - 1]")
    else:
        need(threads_share(c.tile_n * c.tile_k), "B stages that split evenly over threads")
    need(lds_bytes(c, k) <= 163840, "an LDS arena of at most 163840 bytes")


# Largest M, then tile_m, tile_n, tile_k, m_warp, n_warp, num_buffers, B straight to VGPRs.
_TIERS = (
    (16, (16, 32, 256, 1, 1, 4, False)),
    (32, (32, 64, 512, 1, 4, 3, False)),
    (64, (64, 32, 512, 4, 1, 3, False)),
    (256, (64, 64, 256, 2, 2, 2, False)),
    (1024, (128, 128, 128, 1, 4, 2, False)),
    (2048, (128, 128, 128, 2, 2, 2, False)),
    (math.inf, (256, 256, 128, 1, 4, 2, True)),
)


def _candidates(m: int, n: int) -> Iterator[Config]:
    tm, tn, tk, mw, nw, nb, direct = next(tier for most, tier in _TIERS if m <= most)
    for per_stage in (False, True):
        for tile_k in (size for size in (512, 256, 128) if size <= tk):
            for tile_n in (size for size in (256, 128, 64, 32) if size <= tn):
                for buffers in range(nb, 1, -1):
                    for straight in (True, False) if direct else (False,):
                        tiles = -(-m // tm) * (n // tile_n)
                        for splits in (16, 8, 4, 2, 1):
                            if splits > 1 and (straight or tiles * splits > 256):
                                continue
                            yield Config(
                                tm, tile_n, tile_k, mw, min(nw, tile_n // 16), buffers,
                                splits, ahead=1 if straight else 0, xcd=straight,
                                per_stage=per_stage,
                            )  # fmt: skip


@functools.lru_cache(1024)
def pick_kernel(
    m: int, n: int, k: int, x_k: int = 32, w_n: int = 32, w_k: int = 32, one_row: bool = True
) -> str:
    """Name of the kernel that the heuristic of section 4 takes; ValueError if none fits."""
    for config in _candidates(m, n):
        try:
            check_config(config, n, k, x_k=x_k, w_n=w_n, w_k=w_k, one_row=one_row)
        except ValueError:
            continue
        return config.name
    raise ValueError(f"no bmm kernel config for M={m} N={n} K={k}, w_scale {w_n}x{w_k}")
