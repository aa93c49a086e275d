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
from doubles import aiter_double
from doubles.aiter_cases import problem, run
from doubles.aiter_spec import GEMM, IMPORT_ERRORS
from support import environment

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


@pytest.mark.parametrize(("name", "error"), IMPORT_ERRORS.items())
def test_import_raises(name, error):
    kind, text = error
    with aiter_double.install(broken=name) as aiter:
        assert importlib.util.find_spec("aiter") is not None
        for _ in range(2):
            with pytest.raises(kind, match=text):
                importlib.import_module(OPS)
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
            assert aiter_double.current() is inner
            assert inner.imports == ["aiter", "aiter.ops", OPS]
            with pytest.raises(RuntimeError, match="on top of this one"):
                outer.uninstall()
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


@pytest.mark.parametrize("name", IMPORT_ERRORS)
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
