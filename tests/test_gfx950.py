"""Runs tests/gfx950 in a subprocess on vLLM 0.33.0's simulated ROCm platform."""

import os
import re
import subprocess
import sys

import pytest
from doubles import aiter_double, shared_data
from support import ROOT, environment

HOST = ROOT / ".venv" / "hosts" / "vllm-0.33.0"


@pytest.mark.full
def test_on_a_simulated_gfx950(tmp_path):
    if not (HOST / "vllm").is_dir():
        pytest.skip(
            f"vLLM 0.33.0 is not in {HOST.relative_to(ROOT)}; `make test-all` puts it there"
        )
    # vLLM looks for AITER when it is imported, so the double must be importable then.
    data = shared_data()
    aiter_double.write_package(
        tmp_path / "aiter", table=data / aiter_double.TABLE_FILE if data else None
    )
    paths = [
        str(HOST),
        str(tmp_path / "aiter"),
        str(ROOT / "tests"),
        os.environ.get("PYTHONPATH"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gfx950"],
        env=environment(
            PYTHONPATH=os.pathsep.join(filter(None, paths)),
            MXFP8_SIMULATED_GFX950="1",
            VLLM_ROCM_USE_AITER="1",
            VLLM_PLUGINS="rocm_mxfp8",
        ),
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=ROOT,
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 80
