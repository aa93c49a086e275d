"""A real vLLM engine on this CPU, plugin auto-loaded, against the baseline kernel.

Six starts, two at a time, once per module (`make test` allows eight; test_demo.py has two).
"""

import json
from functools import partial

import pytest
from support import assert_same_answers, run_engine, run_engines

pytestmark = pytest.mark.engine

OURS = {"VLLM_ROCM_MXFP8_BACKEND": "reference"}
BASELINE = {"VLLM_ROCM_MXFP8": "off", "MXFP8_DEMO_BASELINE": "1"}


@pytest.fixture(scope="module")
def report_path(tmp_path_factory):
    return tmp_path_factory.mktemp("report") / "report.json"


@pytest.fixture(scope="module")
def runs(checkpoints, report_path):
    block32, plain = checkpoints["block32"], checkpoints["plain"]
    return run_engines(
        ours=partial(
            run_engine, block32, env={**OURS, "VLLM_ROCM_MXFP8_REPORT": str(report_path)}
        ),
        baseline=partial(run_engine, block32, env=BASELINE),
        plain_ours=partial(run_engine, plain, env={**OURS, "VLLM_ROCM_MXFP8": "require"}),
        plain_baseline=partial(run_engine, plain, env=BASELINE),
        # The baseline kernel serves, so the load itself succeeds; `require` must object.
        required=partial(
            run_engine, plain, env={"VLLM_ROCM_MXFP8": "require", "MXFP8_DEMO_BASELINE": "1"}
        ),
        unquantized=partial(
            run_engine, checkpoints["bf16"], env={**OURS, "VLLM_ROCM_MXFP8": "require"}
        ),
    )


def test_32x32_and_1x32_layers_generate_what_the_baseline_generates(runs):
    assert_same_answers(runs["ours"].check(), runs["baseline"].check())
    assert "Using AiterMxfp8LinearKernel for MXFP8 GEMM" in runs["ours"].log
    assert "Using BaselineMxfp8LinearKernel for MXFP8 GEMM" in runs["baseline"].log


def test_a_plain_modelopt_checkpoint_under_require(runs):
    assert_same_answers(runs["plain_ours"].check(), runs["plain_baseline"].check())
    # Other weights, other answers: otherwise the comparison would compare nothing.
    assert runs["plain_ours"].tokens != runs["ours"].tokens


def test_the_log_says_so_once(runs):
    active, summary = runs["ours"].ours()
    assert active == (
        "[rocm-mxfp8] active: AiterMxfp8LinearKernel (cpu, reference backend, vllm 0.32.0)"
    )
    assert summary == "[rocm-mxfp8] 8 of 8 MXFP8 linears on the reference backend (4 shapes)"


def test_off_says_so_and_why(runs):
    inactive, summary = runs["baseline"].ours()
    assert inactive == (
        "[rocm-mxfp8] not active: VLLM_ROCM_MXFP8=off; vLLM's own kernels serve"
    )
    assert "0 of 8 MXFP8 linears; 8 on BaselineMxfp8LinearKernel" in summary


def test_the_report_lists_every_linear(runs, report_path):
    content = json.loads(report_path.with_name("report.rank0.json").read_text())
    assert content["active"] is True
    assert content["vllm"] == "0.32.0"
    layers = {row["layer"]: row for row in content["layers"]}
    assert len(layers) == 8
    for i in (0, 1):
        prefix = f"model.layers.{i}"
        qkv = layers[f"{prefix}.self_attn.qkv_proj"]
        assert (qkv["n"], qkv["k"], qkv["block"], qkv["ours"]) == (512, 256, "1x32", True)
        gate_up = layers[f"{prefix}.mlp.gate_up_proj"]
        assert (gate_up["n"], gate_up["k"], gate_up["block"]) == (1024, 256, "32x32")
        assert layers[f"{prefix}.mlp.down_proj"]["block"] == "32x32"
        assert layers[f"{prefix}.self_attn.o_proj"]["block"] == "32x32"


def test_require_fails_after_loading_with_the_reason(runs):
    run = runs["required"]
    assert run.exit_code != 0
    assert not run.tokens
    assert "VLLM_ROCM_MXFP8=require, but none of 8 MXFP8 linears is ours" in run.log
    assert "platform is cpu, not ROCm" in run.log


def test_a_model_without_mxfp8_linears_gets_no_line_even_under_require(runs):
    assert runs["unquantized"].check().ours() == []
    assert len(runs["unquantized"].tokens) == 8
