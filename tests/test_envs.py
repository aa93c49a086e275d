import re
from pathlib import Path

import pytest
from support import ROOT, run_python

from vllm_rocm_mxfp8 import envs


def test_defaults():
    got = envs.read({"HOME": "/home/someone"})
    assert (got.mode, got.backend, got.fusion, got.warmup) == ("auto", "auto", True, True)
    assert (got.warmup_jobs, got.tuning, got.report) == (None, None, None)
    assert got.cache_dir.name == "vllm_rocm_mxfp8"
    assert envs.read({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/vllm_rocm_mxfp8")


@pytest.mark.parametrize("name", [v.name for v in envs.VARIABLES])
def test_an_empty_value_counts_as_unset(name):
    assert envs.read({name: ""}) == envs.read({})


@pytest.mark.parametrize(
    ("name", "value", "field", "parsed"),
    [
        ("VLLM_ROCM_MXFP8", "auto", "mode", "auto"),
        ("VLLM_ROCM_MXFP8", "off", "mode", "off"),
        ("VLLM_ROCM_MXFP8", "require", "mode", "require"),
        ("VLLM_ROCM_MXFP8_BACKEND", "auto", "backend", "auto"),
        ("VLLM_ROCM_MXFP8_BACKEND", "aiter", "backend", "aiter"),
        ("VLLM_ROCM_MXFP8_BACKEND", "reference", "backend", "reference"),
        ("VLLM_ROCM_MXFP8_FUSION", "0", "fusion", False),
        ("VLLM_ROCM_MXFP8_FUSION", "1", "fusion", True),
        ("VLLM_ROCM_MXFP8_WARMUP", "0", "warmup", False),
        ("VLLM_ROCM_MXFP8_WARMUP", "1", "warmup", True),
        ("VLLM_ROCM_MXFP8_WARMUP_JOBS", "1", "warmup_jobs", 1),
        ("VLLM_ROCM_MXFP8_WARMUP_JOBS", "64", "warmup_jobs", 64),
        ("VLLM_ROCM_MXFP8_CACHE_DIR", "/somewhere/new", "cache_dir", Path("/somewhere/new")),
        ("VLLM_ROCM_MXFP8_REPORT", "/somewhere/r.json", "report", Path("/somewhere/r.json")),
    ],
)
def test_legal_values(name, value, field, parsed):
    assert getattr(envs.read({name: value}), field) == parsed


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("VLLM_ROCM_MXFP8", "on", "auto, off, require"),
        ("VLLM_ROCM_MXFP8", "1", "auto, off, require"),
        ("VLLM_ROCM_MXFP8", "Auto", "auto, off, require"),
        ("VLLM_ROCM_MXFP8", " ", "auto, off, require"),
        ("VLLM_ROCM_MXFP8_BACKEND", "cuda", "auto, aiter, reference"),
        ("VLLM_ROCM_MXFP8_BACKEND", "flydsl", "auto, aiter, reference"),
        ("VLLM_ROCM_MXFP8_FUSION", "true", "0, 1"),
        ("VLLM_ROCM_MXFP8_WARMUP", "2", "0, 1"),
        ("VLLM_ROCM_MXFP8_WARMUP_JOBS", "0", "at least 1"),
        ("VLLM_ROCM_MXFP8_WARMUP_JOBS", "-3", "at least 1"),
        ("VLLM_ROCM_MXFP8_WARMUP_JOBS", "1.5", "at least 1"),
        ("VLLM_ROCM_MXFP8_WARMUP_JOBS", "many", "at least 1"),
        ("VLLM_ROCM_MXFP8_WARMUP_JOBS", "1" * 5000, "at least 1"),
        ("VLLM_ROCM_MXFP8_REPORT", "/" + "a" * 300, "file to write"),
        ("VLLM_ROCM_MXFP8_REPORT", str(ROOT / "LICENSE" / "r.json"), "file to write"),
        ("VLLM_ROCM_MXFP8_CACHE_DIR", "/" + "a" * 300, "a directory"),
        ("VLLM_ROCM_MXFP8_CACHE_DIR", str(ROOT / "LICENSE" / "x"), "a directory"),
        ("VLLM_ROCM_MXFP8_WARMUP_JOBS", "\u0663", "at least 1"),
        ("VLLM_ROCM_MXFP8_TUNING", "/no/such/file", "readable file"),
        ("VLLM_ROCM_MXFP8_TUNING", "/", "readable file"),
        ("VLLM_ROCM_MXFP8_REPORT", "/", "file to write"),
        ("VLLM_ROCM_MXFP8_CACHE_DIR", str(ROOT / "LICENSE"), "a directory"),
    ],
)
def test_an_illegal_value_is_named_with_the_legal_ones(name, value, legal):
    with pytest.raises(ValueError, match=re.escape(legal)) as error:
        envs.read({name: value})
    assert f"{name}={value!r}" in str(error.value)
    assert f"unset {name}" in str(error.value)


def test_a_planned_backend_is_told_from_a_mistyped_one():
    with pytest.raises(ValueError, match="not implemented in this version"):
        envs.read({"VLLM_ROCM_MXFP8_BACKEND": "triton"})


def test_unknown_variables_are_matched_to_the_nearest_name():
    found = envs.unknown_variables(
        {
            "VLLM_ROCM_MXFP8_BACKND": "aiter",
            "VLLM_ROCM_MXFP8": "auto",
            "VLLM_ROCM_USE_AITER": "1",
        }
    )
    assert found == {"VLLM_ROCM_MXFP8_BACKND": "VLLM_ROCM_MXFP8_BACKEND"}


def test_the_readme_documents_every_setting_with_its_legal_values():
    text = (ROOT / "README.md").read_text()
    for variable in envs.VARIABLES:
        rows = [line for line in text.splitlines() if line.startswith(f"| `{variable.name}` |")]
        assert len(rows) == 1, variable.name
        for value in variable.legal.split(", ") if "path" not in variable.legal else ():
            assert value.split()[-1] in rows[0], (variable.name, value)


COMPILE_KEY = """
import os, sys
import vllm.envs
from vllm.config.utils import hash_factors
import vllm_rocm_mxfp8
def key():
    return hash_factors(vllm.envs.compile_factors())
without = key()
vllm_rocm_mxfp8.register()
base = key()
assert base != without, "the plugin's presence is not part of the key"
def changed(name, value):
    os.environ[name] = value
    try:
        return key() != base
    finally:
        del os.environ[name]
for name, value in [("", "off"), ("", "require"), ("_BACKEND", "reference"), ("_FUSION", "0")]:
    assert changed("VLLM_ROCM_MXFP8" + name, value), name
for name, value in [("", "auto"), ("_BACKEND", "auto"), ("_FUSION", "1")]:
    assert not changed("VLLM_ROCM_MXFP8" + name, value), f"default spelled out: {name}"
for name, value in [("_WARMUP", "0"), ("_WARMUP_JOBS", "3"), ("_CACHE_DIR", "/x"), ("_REPORT", "/y")]:
    assert not changed("VLLM_ROCM_MXFP8" + name, value), f"{name} must not recompile"
# Illegal values never make a getter raise (vLLM would drop the entry from the key).
for name in ("", "_BACKEND", "_FUSION", "_WARMUP_JOBS", "_TUNING"):
    os.environ["VLLM_ROCM_MXFP8" + name] = "nonsense"
illegal = vllm.envs.compile_factors()
assert illegal["VLLM_ROCM_MXFP8"] == "nonsense"
assert "unreadable" in illegal["VLLM_ROCM_MXFP8_TUNING"]
os.environ["VLLM_ROCM_MXFP8_TUNING"] = "~nosuchuser/x"
assert "unreadable" in vllm.envs.compile_factors()["VLLM_ROCM_MXFP8_TUNING"]
for name in ("", "_BACKEND", "_FUSION", "_WARMUP_JOBS", "_TUNING"):
    del os.environ["VLLM_ROCM_MXFP8" + name]
# The tuning file counts by its content, not by its path.
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "a").write_text("one"); (folder / "b").write_text("one"); (folder / "c").write_text("two")
def with_tuning(name):
    os.environ["VLLM_ROCM_MXFP8_TUNING"] = str(folder / name)
    return key()
assert with_tuning("a") == with_tuning("b") != with_tuning("c")
assert with_tuning("a") != base
del os.environ["VLLM_ROCM_MXFP8_TUNING"]
import vllm_rocm_mxfp8.envs as ours
before = key()
ours.LAYOUT_ABI += 1
assert key() != before, "the layout ABI is not part of the key"
# So is the fact that vLLM chose our kernel: the same settings may lead to another one.
before = key()
os.environ["VLLM_ROCM_MXFP8_BACKEND"] = "reference"
vllm_rocm_mxfp8.register()
from vllm.model_executor.kernels.linear import init_mxfp8_linear_kernel
del os.environ["VLLM_ROCM_MXFP8_BACKEND"]
assert key() == before
os.environ["VLLM_ROCM_MXFP8_BACKEND"] = "reference"
init_mxfp8_linear_kernel(weight_shape=(64, 96))
del os.environ["VLLM_ROCM_MXFP8_BACKEND"]
assert key() != before, "selection is not part of the key"
print("KEY OK")
"""


def test_the_compile_key_holds_what_may_change_a_graph_and_nothing_else():
    assert "KEY OK" in run_python(COMPILE_KEY, VLLM_PLUGINS="none").stdout
