"""The AITER double's tuned table, kernel names and heuristic against the contract page."""

import pytest
from doubles import aiter_double, aiter_table

DATA = aiter_double.shared_data()
TABLE = DATA / aiter_double.TABLE_FILE if DATA else None
needs_table = pytest.mark.skipif(TABLE is None, reason="../shared/data is not here")

ROWS = (
    [(m, m, m) for m in (1, 2, 4, 8)]
    + [(16, 5, 7), (16, 9, 16), (32, 17, 32)]
    + [(row, row - 15, row) for row in range(48, 257, 16)]
    + [(row, row - 31, row) for row in range(288, 1025, 32)]
    + [(row, row - 63, row) for row in range(1088, 2049, 64)]
    + [(4096, 2049, 4096), (6144, 6017, 6144), (8192, 4097, 6016), (8192, 6145, 8192)]
)
"""Section 2: row, first and last M that it serves. Row 16 does not serve 8; 3 goes to 4."""


def first_row(rows, m, n):
    return next((p for p in aiter_table.padded_m(m, n) if p in rows), None)


@needs_table
@pytest.mark.parametrize(("n", "k"), [(5120, 2048), (4096, 1280)])
def test_padded_m(n, k):
    table = aiter_table.load_table([TABLE])
    rows = {key[2] for key in table if key[3:5] == (n, k)}
    assert len(rows) == 68
    for row, low, high in ROWS:
        assert {first_row(rows, m, n) for m in range(low, high + 1)} == {row}
    large = range(8193, 40000)
    tops = (10240, 12288, 14336, 16384, 32768)
    for m in large:
        top = next((t for t in tops if t - 127 <= m <= t), None)
        if n > 4096:
            expected = top or 8192
        else:
            expected = top or (16384 if m <= 16384 else 32768 if m <= 32768 else None)
        assert first_row(rows, m, n) == expected, m


@needs_table
def test_every_row_passes_the_kernel_checks():
    """Contract section 3: 1224 rows, all runnable; section 4: the grammar is complete."""
    table = aiter_table.load_table([TABLE])
    assert len(table) == 1224
    for (*_, n, k, block), (row,) in table.items():
        config = aiter_table.parse_name(row["kernelName"], swizzle_digits=False)
        assert (config.name, config.splits) == (row["kernelName"], row["splitK"])
        assert block == "32x32"
        aiter_table.check_config(config, n, k, x_k=32, w_n=32, w_k=32, one_row=False)


@needs_table
@pytest.mark.parametrize(
    ("n", "k", "kernels"),
    [
        (1152, 5120, (25, 44, 47)),
        (1792, 5120, (21, 40, 43)),
        (8192, 1280, (17, 34, 35)),
        (5120, 2048, (22, 37, 39)),
        (4096, 1280, (16, 28, 31)),
        (5120, 576, (17, 31, 32)),
    ],
)
def test_distinct_kernels_of_the_starred_shapes(n, k, kernels):
    table = aiter_table.load_table([TABLE])
    rows = {key[2]: row["kernelName"] for key, (row,) in table.items() if key[3:5] == (n, k)}
    for most, count in zip((512, 2048, 8192), kernels, strict=True):
        assert len({rows[first_row(rows, m, n)] for m in range(1, most + 1)}) == count


LDS = [
    ("t16x32x256_w1x2_nb6_sk1_nt_sps", 2048, 79888),
    ("t16x32x512_w1x2_nb5_sk1_bd3_nt", 2048, 42512),
    ("t64x64x128_w2x2_nb5_sk1_xcd", 2048, 87056),
    ("t128x128x128_w2x4_nb4_sk1_xcd", 2048, 141328),
    ("t96x128x128_w1x2_nb3_sk1_bd2_xcd", 2048, 43536),
    ("t128x256x128_w1x4_nb4_sk1_bd2", 2048, 74768),
    ("t128x256x128_w1x2_nb2_sk1_bd1_sps", 2048, 34832),
    ("t192x256x128_w1x4_nb4_sk1_bd2", 2048, 111632),
    ("t256x256x128_w1x4_nb2_sk1_bd1", 4096, 99344),
    ("t16x32x128_w1x2_nb9_sk4_nt_xcd_sps", 5120, 64528),
    ("t16x32x128_w1x2_nb6_sk1_nt_sps", 576, 43024),
]


@pytest.mark.parametrize(("name", "k", "measured"), LDS)
def test_lds_of_the_compiled_kernels(name, k, measured):
    name = f"flydsl_bmm_mxfp8_mfma_{name}"
    assert (
        aiter_table.lds_bytes(aiter_table.parse_name(name, swizzle_digits=False), k) == measured
    )


def test_the_heuristic_never_fails_on_whole_tiles():
    for n in (*range(32, 1025, 32), 5120, 32768):
        for k in (*range(64, 1025, 64), 5120, 15360):
            for m in (1, 17, 33, 65, 257, 1025, 5000):
                for rows in (32, 1):
                    assert aiter_table.pick_kernel(m, n, k, w_n=rows)
    for n, k in ((16, 128), (48, 128), (64, 96), (5120, 288)):
        for m in (1, 64, 5000):
            with pytest.raises(ValueError, match="no bmm kernel config"):
                aiter_table.pick_kernel(m, n, k, w_n=1)


def test_the_heuristic_counts_of_the_untuned_shapes():
    for shape, count in (((576, 5120), 10), ((5120, 1024), 8)):
        assert len({aiter_table.pick_kernel(m, *shape) for m in range(1, 8193)}) == count
