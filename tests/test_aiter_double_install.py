"""The AITER double's tuned table, and the ways in which it is installed or broken."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import subprocess
import sys

import pytest
import torch
from doubles import aiter_double, aiter_table
from support import environment
from test_aiter_double import GEMM, problem, run

DATA = aiter_double.shared_data()
TABLE = DATA / aiter_double.TABLE_FILE if DATA else None
needs_table = pytest.mark.skipif(TABLE is None, reason="../shared/data is not here")
OPS = "aiter.ops.gemm_op_a8w8"
KERNEL = "flydsl_bmm_mxfp8_mfma_t16x32x128_w1x2_nb2_sk1"
COLUMNS = "gfx,cu_num,M,N,K,w_scale_block,libtype,kernelId,splitK,us,kernelName"


def write_table(path, *rows):
    """rows: (M, N, K, block[, libtype, kernelId, kernelName])."""
    lines = [COLUMNS]
    for m, n, k, block, *rest in rows:
        libtype, kernel_id, name = rest or ("flydsl", "bmm", KERNEL)
        lines.append(f"gfx950,256,{m},{n},{k},{block},{libtype},{kernel_id},1,4.5,{name}")
    path.write_text("\n".join(lines) + "\n")
    return path


def lookup(generation, *key):
    function = importlib.import_module(OPS).get_mxscale_bpreshuffle_config
    return function(*key) if generation == "v1" else function(*key, True)


# --- tuned table --------------------------------------------------------------------------

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


# --- lookup -------------------------------------------------------------------------------


@pytest.mark.parametrize(("generation", "arguments"), [("v2", 5), ("v1", 4)])
def test_lookup(tmp_path, generation, arguments):
    table = write_table(tmp_path / "t.csv", (16, 64, 256, "32x32"))
    with aiter_double.install(generation, table=table) as aiter:
        function = importlib.import_module(OPS).get_mxscale_bpreshuffle_config
        assert function is aiter.lookup
        assert len(inspect.signature(function.__wrapped__).parameters) == arguments
        assert function.cache_info().maxsize == 1024
        row = lookup(generation, 5, 64, 256, "32x32")
        assert row == {
            "libtype": "flydsl", "kernelId": "bmm", "splitK": 1, "us": 4.5,
            "kernelName": KERNEL, "tflops": 0.0, "bw": 0.0, "errRatio": 0.0,
        }  # fmt: skip
        assert aiter.warnings == []
        run(*problem(5, 64, 256))
        assert (aiter.calls[0].kernel, aiter.calls[0].tuned) == (KERNEL, True)
        assert lookup(generation, 17, 64, 256, "32x32") is None
        assert lookup(generation, 5, 64, 256, "1x32") is None
        extra = (True,) if generation == "v1" else ()
        with pytest.raises(TypeError):
            function(5, 64, 256, "32x32", *extra)


def test_one_warning_per_key_on_a_logger_nobody_sees(caplog):
    logger = logging.getLogger("aiter")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with aiter_double.install() as aiter:
        for m in (1, 1, 2, 2, 1):
            assert lookup("v2", m, 64, 128, "32x32") is None
        assert aiter.warnings == [
            f"mxscale bpreshuffle (bmm) M:{m}, N:64, K:128, w_scale 32x32 is untuned on "
            "gfx950; a heuristic picks the kernel."
            for m in (1, 2)
        ]
        assert not logger.propagate
        assert caplog.records == []
        aiter.lookup.cache_clear()
        lookup("v2", 1, 64, 128, "32x32")
        assert len(aiter.warnings) == 3
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_generations_differ_on_other_rows(tmp_path):
    """v2 filters by its flag; v1 sees every row and refuses one that is not bmm."""
    other = ("mxpsh", "7", "flydsl_mxpsh_64x64x128_F8_F8_B16_w1_x1_sk1")
    table = write_table(tmp_path / "t.csv", (4, 64, 256, "32x32", *other))
    tensors = problem(4, 64, 256)
    with aiter_double.install("v2", table=table) as aiter:
        assert lookup("v2", 4, 64, 256, "32x32") is None
        assert aiter.lookup(4, 64, 256, "32x32", False)["kernelId"] == "7"
        run(*tensors)
    with aiter_double.install("v1", table=table) as aiter:
        assert lookup("v1", 4, 64, 256, "32x32")["kernelId"] == "7"
        with pytest.raises(NotImplementedError, match="is not bmm"):
            run(*tensors)
    both = write_table(tmp_path / "b.csv", (4, 64, 256, "32x32"), (4, 64, 256, "32x32", *other))
    with aiter_double.install("v1", table=both), pytest.raises(ValueError, match="unique"):
        lookup("v1", 4, 64, 256, "32x32")
    with aiter_double.install("v2", table=both):
        assert lookup("v2", 4, 64, 256, "32x32")["kernelName"] == KERNEL


def test_names_are_not_portable_between_generations(tmp_path):
    row = (4, 64, 256, "32x32", "flydsl", "bmm", f"{KERNEL}_xcd4")
    table = write_table(tmp_path / "t.csv", row)
    with aiter_double.install("v2", table=table) as aiter:
        run(*problem(4, 64, 256))
        assert aiter.calls[0].kernel == f"{KERNEL}_xcd4"
    with (
        aiter_double.install("v1", table=table),
        pytest.raises(ValueError, match="unrecognised kernelName"),
    ):
        run(*problem(4, 64, 256))


@needs_table
def test_a_partitioned_gpu_has_no_rows(monkeypatch):
    key = (64, 5120, 2048, "32x32", True)
    with aiter_double.install(table=TABLE) as aiter:
        importlib.import_module("aiter")
        assert aiter.lookup(*key)["kernelName"].startswith("flydsl_bmm")
        monkeypatch.setenv("CU_NUM", "64")
        aiter.lookup.cache_clear()
        assert aiter.lookup(*key) is None
    monkeypatch.delenv("CU_NUM")
    with aiter_double.install(table=TABLE, cu_num=64) as aiter:
        assert aiter.lookup(*key) is None


def test_injected_one_row_entries():
    options = {"supports_1x32": True, "rows_1x32": [(1, 64, 128), (16, 64, 128, KERNEL)]}
    with aiter_double.install(**options) as aiter:
        assert lookup("v2", 1, 64, 128, "1x32")["kernelId"] == "bmm"
        run(*problem(9, 64, 128, w_rows=1))
        assert (aiter.calls[0].kernel, aiter.calls[0].tuned) == (KERNEL, True)


def test_the_table_variable_wins(tmp_path, monkeypatch):
    paths = [write_table(tmp_path / f"{n}.csv", (1, n, 256, "32x32")) for n in (64, 128)]
    monkeypatch.setenv(
        "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_MXSCALE_BPRESHUFFLE", ":".join(map(str, paths))
    )
    with aiter_double.install(table=tmp_path / "missing.csv"):
        assert lookup("v2", 1, 64, 256, "32x32")
        assert lookup("v2", 1, 128, 256, "32x32")


# --- broken in one piece ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ImportError", "RuntimeError", "AssertionError", "OSError"])
def test_import_raises(name):
    with aiter_double.install(broken=name) as aiter:
        assert importlib.util.find_spec("aiter") is not None
        for _ in range(2):
            with pytest.raises(Exception, match=".") as caught:
                importlib.import_module("aiter.ops.gemm_op_a8w8")
            assert type(caught.value).__name__ == name
        assert "aiter" not in sys.modules
        assert aiter.imports == ["aiter", "aiter"]
        assert importlib.metadata.version("amd-aiter") == "0.1.28"


@pytest.mark.parametrize("broken", ["csv", "lookup_raises"])
def test_the_lookup_raises(broken):
    kind = ValueError if broken == "csv" else RuntimeError
    with aiter_double.install(broken=broken):
        for _ in range(2):
            with pytest.raises(kind):
                lookup("v2", 1, 64, 128, "32x32")
        with pytest.raises(kind):
            run(*problem(1, 64, 128))


def test_the_op_is_missing_and_comes_back():
    with aiter_double.install():
        run(*problem(1, 64, 128))
    with aiter_double.install(broken="no_op"):
        ops = importlib.import_module(OPS)
        assert hasattr(ops, "get_mxscale_bpreshuffle_config")
        for place in (ops, sys.modules["aiter"], torch.ops.aiter):
            assert not hasattr(place, GEMM)
    with aiter_double.install():
        run(*problem(1, 64, 128))


def test_flydsl_is_broken_but_aiter_imports():
    with aiter_double.install(broken="flydsl"):
        ops = importlib.import_module(OPS)
        with pytest.raises(ImportError, match="SMEM_CAPACITY_MAP"):
            importlib.import_module("aiter.ops.flydsl")
        with pytest.raises(ImportError):
            ops.bmm_a8w8_mxfp8_supported("32x32", False)
        with pytest.raises(ImportError):
            run(*problem(1, 64, 128))


def test_names_left_out():
    with aiter_double.install(without=["bmm_a8w8_mxfp8_supported"]):
        assert not hasattr(importlib.import_module(OPS), "bmm_a8w8_mxfp8_supported")
        probe = importlib.import_module("aiter.ops.flydsl.batched_gemm_a8w8")
        assert not hasattr(probe, "bmm_a8w8_mxfp8_supported")


# --- installation -------------------------------------------------------------------------


def test_nothing_is_imported_by_installing_and_everything_is_restored():
    before = (dict(sys.modules), list(sys.meta_path))
    with aiter_double.install("v1") as outer:
        assert "aiter" not in sys.modules
        v1 = importlib.import_module("aiter")
        with aiter_double.install(version="9.9") as inner:
            assert "aiter" not in sys.modules
            assert importlib.import_module("aiter").__version__ == "9.9"
            assert importlib.metadata.version("amd_aiter") == "9.9"
            assert (inner.imports, aiter_double.current()) == (["aiter", OPS], inner)
            with pytest.raises(RuntimeError, match="on top of this one"):
                outer._undo()
        assert sys.modules["aiter"] is v1
        assert aiter_double.current() is outer
    outer.uninstall()
    assert (dict(sys.modules), list(sys.meta_path)) == before
    assert importlib.util.find_spec("aiter") is None
    with pytest.raises(RuntimeError, match="no AITER double"):
        aiter_double.current()


def test_the_op_follows_the_installed_generation():
    tensors = problem(4, 256, 256)
    with aiter_double.install():
        right, op = run(*tensors), getattr(torch.ops.aiter, GEMM)
    with aiter_double.install("old"):
        assert not torch.equal(run(*tensors), right)
        assert getattr(torch.ops.aiter, GEMM) is op
    with pytest.raises(RuntimeError, match="no AITER double"):
        op(*tensors)


def test_schema_and_compile():
    with aiter_double.install():
        importlib.import_module("aiter")
        op = getattr(torch.ops.aiter, GEMM)
        assert str(op.default._schema) == (
            "aiter::gemm_a8w8_blockscale_bpreshuffle(Tensor(a0!) XQ, Tensor(a1!) WQ, "
            "Tensor(a2!) x_scale, Tensor(a3!) w_scale, ScalarType dtype=15, "
            "Tensor(a5!)? out=None) -> Tensor"
        )
        xq, wq, x_scale, w_scale = problem(4, 64, 128)
        scales = (x_scale.view(torch.float8_e8m0fnu), w_scale.view(torch.float8_e8m0fnu))
        compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(xq, wq, *scales), op(xq, wq, *scales))


@pytest.mark.parametrize(
    "wrong",
    [{"generation": "v3"}, {"broken": "x"}, {"fault": "x"}, {"supports_1x32": "x"}],
)
def test_unknown_choices(wrong):
    with pytest.raises(ValueError, match="legal"):
        aiter_double.install(**wrong)


# --- in a subprocess ----------------------------------------------------------------------

CHILD = """
import importlib.metadata, sys
assert "aiter" not in sys.modules and "doubles" not in sys.modules
from aiter.ops.gemm_op_a8w8 import get_mxscale_bpreshuffle_config as lookup
from aiter.ops.shuffle import shuffle_weight
import aiter, torch
from aiter.ops.flydsl.batched_gemm_a8w8 import bmm_a8w8_mxfp8_supported
from doubles import aiter_double
assert aiter.__file__ == {init!r}, aiter.__file__
assert importlib.metadata.version("amd-aiter") == aiter.__version__ == "0.1.28"
assert bmm_a8w8_mxfp8_supported("1x32", False)
assert lookup(1, 64, 128, "1x32")["kernelId"] == "bmm"
w = shuffle_weight(torch.ones(64, 128).to(torch.float8_e4m3fn))
s = torch.full((64, 4), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
y = aiter.gemm_a8w8_blockscale_bpreshuffle(w[:1], w, s[:1], s)
assert torch.equal(y, torch.full((1, 64), 128.0, dtype=torch.bfloat16))
assert len(aiter_double.current().launches) == 1
assert not torch.cuda.is_initialized()
"""


def child(folder, code):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=str(folder)),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_package_in_a_subprocess(tmp_path):
    events = tmp_path / "events.jsonl"
    folder = aiter_double.write_package(
        tmp_path / "a folder",
        generation="v1",
        supports_1x32=True,
        rows_1x32=[(1, 64, 128)],
        calls_file=events,
    )
    done = child(folder, CHILD.format(init=str(folder / "aiter" / "__init__.py")))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert [line["import"] for line in lines if "import" in line][:2] == ["aiter", "aiter.ops"]
    (call,) = [line["call"] for line in lines if "call" in line]
    assert (call["n"], call["tuned"], call["launched"]) == (64, True, True)


@pytest.mark.parametrize("name", ["ImportError", "RuntimeError", "AssertionError", "OSError"])
def test_broken_package_in_a_subprocess(tmp_path, name):
    folder = aiter_double.write_package(tmp_path, broken=name)
    done = child(
        folder,
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('aiter')\n"
        "try: import aiter\n"
        "except Exception as error: print(type(error).__name__, 'aiter' in sys.modules)\n",
    )
    assert done.stdout == f"{name} False\n", done.stderr
