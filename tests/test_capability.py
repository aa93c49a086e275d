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
    facts = {
        "mode": "auto",
        "backend": "auto",
        "platform": "rocm",
        "arch": "gfx950",
        "batch_invariant": False,
    }
    return Process(**{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"mode": "off"}, "off", "VLLM_ROCM_MXFP8=off"),
        ({"mode": "off", "backend": "reference"}, "off", "VLLM_ROCM_MXFP8=off"),
        ({"host_problem": "symbol gone", "backend": "reference"}, "host", "symbol gone"),
        ({"platform": "cpu"}, "platform", "platform is cpu, not ROCm"),
        ({"platform": "cuda", "backend": "aiter"}, "platform", "platform is cuda, not ROCm"),
        ({"arch": "gfx942"}, "arch", "the GPU is gfx942"),
        ({"arch": "gfx1250"}, "arch", "the GPU is gfx1250"),
        ({"arch": ""}, "arch", "the GPU is unknown"),
        (
            {"aiter_off": "VLLM_ROCM_USE_AITER is off"},
            "aiter_off",
            "VLLM_ROCM_USE_AITER is off",
        ),
        ({"aiter_problem": "AITER is not installed"}, "aiter", "AITER is not installed"),
        ({"batch_invariant": True}, "batch_invariant", "VLLM_BATCH_INVARIANT"),
        ({"backend": "reference", "batch_invariant": True}, "batch_invariant", "VLLM_BATCH"),
    ],
)
def test_refusals_of_a_process(changes, code, words):
    verdict = check_process(process(**changes))
    assert not verdict.ok
    assert verdict.code == code
    assert words in verdict.text


@pytest.mark.parametrize("backend", ["auto", "aiter"])
def test_gfx950_with_aiter_is_served(backend):
    assert check_process(process(backend=backend)).ok


def test_vllms_aiter_switch_does_not_gate_the_reference_backend():
    assert check_process(process(backend="reference", aiter_off="off", aiter_problem="x")).ok


@pytest.mark.parametrize(
    ("n", "k", "facts", "backend", "code"),
    [
        (5120, 2048, {"block": "32x32"}, "auto", "ok"),
        (5120, 576, {"block": "32x32"}, "aiter", "ok"),
        (5120, 288, {"block": "32x32"}, "auto", "k_tile"),
        (1168, 64, {"block": "32x32"}, "auto", "n_tile"),
        (2560, 6144, {}, "auto", "1x32"),
        (2560, 6144, {"runs_1x32": True}, "auto", "1x32"),
        (2560, 6144, {"tuned_1x32": True}, "auto", "ok"),
        (2560, 6144, {"tuned_1x32": True}, "aiter", "1x32"),
        (2560, 6144, {"runs_1x32": True}, "aiter", "ok"),
        (1160, 6144, {"runs_1x32": True}, "aiter", "n_tile"),
    ],
)
def test_layers_on_aiter(n, k, facts, backend, code):
    verdict = check_layer(Layer(n, k, **facts), backend)
    assert verdict.code == code
    assert verdict.ok == (code == "ok")


@pytest.mark.parametrize(
    ("dtype", "backend", "ok"),
    [
        ("bfloat16", "auto", True),
        ("", "auto", True),
        ("float16", "auto", False),
        ("float32", "aiter", False),
        ("float16", "reference", True),
    ],
)
def test_aiter_computes_bfloat16_only(dtype, backend, ok):
    verdict = check_model(Model(dtype=dtype), backend)
    assert verdict.ok == ok
    assert ok or dtype in verdict.text


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
    assert check_model(Model(), "auto").ok
    verdict = check_model(Model(monokernel="--monokernel"), "reference")
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
