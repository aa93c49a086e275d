"""Shared by the tests: subprocesses with a chosen environment, and engine runs in them."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO_SUPPORT = ROOT / "examples" / "demo_support"
PREFIX = "VLLM_ROCM_MXFP8"


def environment(**overrides: str | None) -> dict[str, str]:
    """This process's environment without the plugin's settings, plus overrides."""
    env = {k: v for k, v in os.environ.items() if not k.startswith((PREFIX, "MXFP8_DEMO"))}
    paths = [str(DEMO_SUPPORT), *filter(None, [env.get("PYTHONPATH")])]
    env |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Several workers, or several engines at once, on one NUMA node.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # With the engine core in the process that adds the requests, every run batches them
        # alike; vLLM's CPU attention and linears round differently in other batches. The
        # workers are processes of their own as ever (the demo's server has all of them).
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_COLOR": "0",
    }
    for name, value in overrides.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def run_python(
    code: str, timeout: float = 240, **env: str | None
) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter; fails with its output unless it exits 0."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    return done


@dataclass(frozen=True)
class EngineRun:
    """tokens: one list per prompt; logprobs of them; log: everything the engine printed."""

    exit_code: int
    tokens: list[list[int]]
    logprobs: list[list[float]]
    log: str
    seconds: float

    def ours(self) -> list[str]:
        """The plugin's log lines, from its prefix on."""
        return [
            line[line.index("[rocm-mxfp8]") :]
            for line in self.log.splitlines()
            if "[rocm-mxfp8]" in line
        ]

    def check(self) -> "EngineRun":
        assert self.exit_code == 0, self.log[-8000:]
        return self


def run_engine(
    model: Path,
    *,
    timeout: float = 560,
    force_compile: bool = False,
    env: dict[str, str | None] | None = None,
    **llm: Any,
) -> EngineRun:
    """Start a real vLLM engine in a subprocess, generate, stop it (tests/engine_main.py)."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        spec = {"model": str(model), "result": str(result), "llm": llm, "force": force_compile}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "engine_main.py"), json.dumps(spec)],
            env=environment(**(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            cwd=ROOT,
        )
        seconds = time.monotonic() - began
        found = json.loads(result.read_text()) if result.exists() else {}
    return EngineRun(
        done.returncode,
        found.get("tokens", []),
        found.get("logprobs", []),
        done.stdout,
        seconds,
    )


def run_engines(**runs: Callable[[], EngineRun]) -> dict[str, EngineRun]:
    """Independent runs, two at a time: a start is mostly imports, on one core."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = {name: pool.submit(run) for name, run in runs.items()}
        return {name: future.result() for name, future in started.items()}


def assert_same_answers(ours: EngineRun, baseline: EngineRun) -> None:
    """Greedy tokens equal, logprobs within 1e-2."""
    assert len(baseline.tokens) == 8
    assert all(len(t) == 32 for t in baseline.tokens)
    for i, (mine, theirs) in enumerate(zip(ours.tokens, baseline.tokens, strict=True)):
        assert mine == theirs, f"prompt {i}: first difference at token {_first(mine, theirs)}"
    for i, (mine, theirs) in enumerate(zip(ours.logprobs, baseline.logprobs, strict=True)):
        differences = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
        assert all(d <= 1e-2 for d in differences), f"prompt {i}: {differences}"
    # Guards against a model that always says the same: nothing would be compared.
    assert len({t for tokens in baseline.tokens for t in tokens}) > 32


def _first(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
