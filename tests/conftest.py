"""Makes tests/support.py and the demo's checkpoint writer importable, and keeps the
plugin's settings of the shell out of the tests."""

import os
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "examples" / "demo_support")]

for _name in [n for n in os.environ if n.startswith("VLLM_ROCM_MXFP8")]:
    del os.environ[_name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small checkpoints, written once: ``plain`` (ModelOpt, 1x32), ``block32`` (MLPs with
    32x32 blocks), ``mla`` (DeepSeek-V2), ``bf16`` (no quantization)."""
    from mxfp8_demo import checkpoint

    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "plain": checkpoint.write_llama(folder / "plain", seed=1),
        "block32": checkpoint.write_llama(folder / "block32", block32=("mlp", "o_proj")),
        "mla": checkpoint.write_deepseek_v2(folder / "mla"),
        "bf16": checkpoint.write_llama(folder / "bf16", quantized=False),
    }
