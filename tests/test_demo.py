"""`make demo` as a user runs it, and its comparison on answers that differ."""

import importlib.util
import math
import subprocess
import sys

import pytest
from support import ROOT, environment


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(demo):
    return [
        {
            "text": f"answer {i}",
            "tokens": [f"t{i}-{j}" for j in range(demo.TOKENS)],
            "token_logprobs": [-0.5] * demo.TOKENS,
        }
        for i in range(8)
    ]


def test_equal_answers_pass(demo):
    assert demo.compare(answers(demo), answers(demo)) == 0


def test_another_token_fails_and_is_named(demo, capsys):
    other = answers(demo)
    other[3]["tokens"][30] = "wrong"
    assert demo.compare(answers(demo), other) == 1
    assert (
        "prompt 3, token 30: 't3-30' with the plugin, 'wrong' without"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(("value", "code"), [(-0.509, 0), (-0.511, 1), (math.nan, 1)])
def test_logprobs_are_compared_within_a_hundredth(demo, value, code):
    other = answers(demo)
    other[7]["token_logprobs"][0] = value
    assert demo.compare(answers(demo), other) == code


def test_a_short_answer_fails(demo):
    other = answers(demo)
    other[0]["tokens"].pop()
    assert demo.compare(answers(demo), other) == 1


def test_every_prompt_is_in_the_vocabulary(demo, tmp_path):
    from mxfp8_demo.checkpoint import write_tokenizer
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoded = [tokenizer.encode(prompt).ids for prompt in demo.prompts()]
    assert len({tuple(ids) for ids in encoded}) == 8
    assert all(0 not in ids for ids in encoded), encoded
    assert tokenizer.decode(encoded[1]) == demo.prompts()[1]


@pytest.mark.engine
def test_the_demo_runs_and_shows_the_kernel_table():
    """Two starts of `vllm serve`."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        # A setting left in the user's shell must not change what the demo shows.
        env=environment(PYTHONPATH=None, VLLM_ROCM_MXFP8="off"),
        capture_output=True,
        text=True,
        timeout=900,
        cwd="/",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rocm-mxfp8] active: AiterMxfp8LinearKernel" in done.stdout
    assert "model.layers.1.mlp.down_proj" in done.stdout
    assert done.stdout.count("32x32") >= 4
    assert "same answers: 8 prompts x 32 greedy tokens equal" in done.stdout
