"""Slow engine runs (`make test-all`): stale compiled graphs, tensor parallelism, MLA."""

from functools import partial

import pytest
from mxfp8_demo import checkpoint
from support import assert_same_answers, run_engine, run_engines

pytestmark = [pytest.mark.engine, pytest.mark.full]

OURS = {"VLLM_ROCM_MXFP8_BACKEND": "reference"}
BASELINE = {"VLLM_ROCM_MXFP8": "off", "MXFP8_DEMO_BASELINE": "1"}
TRACED_BASELINE = {**BASELINE, "MXFP8_DEMO_BASELINE": "traced"}
FORGET_KEY = {"MXFP8_DEMO_FORGET_KEY": "1"}
LOADED = "Directly load AOT compilation"


@pytest.fixture(scope="module")
def compiled_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    return checkpoint.write_llama(folder / "model", block32=("mlp",), layers=1)


def compiled(model, cache, **env):
    return run_engine(model, force_compile=True, env={"VLLM_CACHE_ROOT": str(cache), **env})


@pytest.fixture(scope="module")
def toggled(compiled_model, tmp_path_factory):
    """On, off, on with one cache; off, on with another cache and without our key entries."""
    cache, control = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("control")

    def with_key():
        environments = (OURS, BASELINE, OURS)
        return [compiled(compiled_model, cache, **env).check() for env in environments]

    def without_key():
        environments = (TRACED_BASELINE, OURS)
        return [compiled(compiled_model, control, **env, **FORGET_KEY) for env in environments]

    return run_engines(with_key=with_key, without_key=without_key)


def test_on_off_on_with_one_compile_cache_is_right_each_time(toggled):
    on, off, on_again = toggled["with_key"]
    assert_same_answers(on, off)
    assert_same_answers(on_again, off)
    assert LOADED not in on.log
    assert LOADED not in off.log
    # The third run finds the first one's graph, so the cache did work.
    assert LOADED in on_again.log


def test_without_our_key_the_stale_graph_gives_wrong_tokens(toggled):
    """Shows that the test above can fail, and what it protects from."""
    off, on = toggled["without_key"]
    assert LOADED not in off.check().log
    assert LOADED in on.check().log
    assert len(off.tokens) == len(on.tokens) == 8
    right = toggled["with_key"][0].tokens
    assert sum(a != b for a, b in zip(on.tokens, right, strict=True)) == 8
    # Not the control's fault: what it traced itself gives ordinary answers. (Inductor keeps
    # more digits than eager between traced operations, so they need not be equal.)
    assert len({t for tokens in off.tokens for t in tokens}) > 32


@pytest.fixture(scope="module")
def parallel(checkpoints):
    model = checkpoints["block32"]
    start = partial(run_engine, model, tensor_parallel_size=2)
    return run_engines(
        off=partial(start, env=BASELINE),
        auto=partial(start, env=OURS),
        require=partial(start, env={**OURS, "VLLM_ROCM_MXFP8": "require"}),
    )


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_two_ranks_generate_what_the_baseline_generates_on_two_ranks(parallel, mode):
    assert_same_answers(parallel[mode].check(), parallel["off"].check())


@pytest.mark.parametrize("mode", ["off", "auto", "require"])
def test_only_rank_0_of_two_prints(parallel, mode):
    lines = parallel[mode].ours()
    assert len(lines) == 2, lines
    assert lines[0].startswith(
        "[rocm-mxfp8] not active" if mode == "off" else "[rocm-mxfp8] active"
    )
    if mode != "off":
        assert "8 of 8 MXFP8 linears on the reference backend" in lines[1]


@pytest.fixture(scope="module")
def latent_attention(checkpoints):
    start = partial(run_engine, checkpoints["mla"])
    return run_engines(ours=partial(start, env=OURS), baseline=partial(start, env=BASELINE))


def test_multi_head_latent_attention(latent_attention):
    """kv_b_proj is absorbed through the kernel's own apply after loading."""
    ours, baseline = latent_attention["ours"], latent_attention["baseline"]
    assert_same_answers(ours.check(), baseline.check())
    assert "12 of 12 MXFP8 linears" in "".join(ours.ours())
    assert "Using CPU_MLA backend" in ours.log
