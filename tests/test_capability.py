import subprocess
import sys

import pytest

from vllm_rocm_mxfp8 import capability
from vllm_rocm_mxfp8.capability import (
    Layer,
    Model,
    Process,
    check_layer,
    check_model,
    check_process,
)


def process(**changes):
    facts = {"mode": "auto", "backend": "auto", "platform": "rocm", "batch_invariant": False}
    return Process(**{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"mode": "off"}, "off", "VLLM_ROCM_MXFP8=off"),
        ({"mode": "off", "backend": "reference"}, "off", "VLLM_ROCM_MXFP8=off"),
        ({"host_problem": "symbol gone", "backend": "reference"}, "host", "symbol gone"),
        ({"platform": "cpu"}, "platform", "platform is cpu, not ROCm"),
        ({"platform": "cuda"}, "platform", "platform is cuda, not ROCm"),
        ({}, "no_backend", "no backend for ROCm yet"),
        ({"backend": "reference", "batch_invariant": True}, "batch_invariant", "VLLM_BATCH"),
    ],
)
def test_refusals_of_a_process(changes, code, words):
    verdict = check_process(process(**changes))
    assert not verdict.ok
    assert verdict.code == code
    assert words in verdict.text


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "xpu"])
@pytest.mark.parametrize("mode", ["auto", "require"])
def test_the_reference_backend_runs_anywhere(platform, mode):
    assert check_process(process(backend="reference", platform=platform, mode=mode)).ok


@pytest.mark.parametrize(
    ("n", "k", "code"),
    [
        (16, 32, "ok"),
        (1152, 5120, "ok"),
        (5120, 288, "ok"),
        (1168, 96, "ok"),
        (1160, 5120, "n_tile"),
        (8, 32, "n_tile"),
        (0, 32, "n_tile"),
        (64, 48, "k_tile"),
        (64, 0, "k_tile"),
    ],
)
def test_shapes_on_the_reference_backend(n, k, code):
    verdict = check_layer(Layer(n, k), "reference")
    assert verdict.code == code
    assert verdict.ok == (code == "ok")
    assert bool(verdict.text) == (code != "ok")
    if code == "n_tile":
        assert f"N={n}" in verdict.text
    if code == "k_tile":
        assert f"K={k}" in verdict.text


def test_a_raw_reader_wins_over_everything_else():
    verdict = check_layer(Layer(8, 48, read_elsewhere="wo_a", problem="dtype"), "reference")
    assert (verdict.code, verdict.text) == ("read_elsewhere", "wo_a")


def test_the_monokernel_is_named():
    assert check_model(Model()).ok
    verdict = check_model(Model(monokernel="--monokernel"))
    assert verdict.code == "monokernel"
    assert verdict.text.startswith("--monokernel reads the weights")


def test_tensors_that_do_not_fit_decline_with_their_words():
    verdict = check_layer(Layer(16, 32, problem="weight is bfloat16"), "reference")
    assert (verdict.code, verdict.text) == ("tensors", "weight is bfloat16")


def test_it_needs_the_standard_library_only():
    code = (
        "import sys, vllm_rocm_mxfp8.capability\n"
        "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert capability.OK.ok
