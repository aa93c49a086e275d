"""Settings. The only module that reads ``os.environ``.

Every variable starts with ``VLLM_ROCM_MXFP8``. An empty value counts as unset, as
in vLLM's container recipes, where ``NAME=`` is the usual way to clear a variable.
"""

import difflib
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "VLLM_ROCM_MXFP8"

LAYOUT_ABI = 1
"""Number of the weight layout and op schema. Raise it whenever a graph traced by an
older version, or a weight processed by it, would be read differently by this one."""

BACKENDS = ("auto", "aiter", "reference")
"""Legal values of ``VLLM_ROCM_MXFP8_BACKEND`` in this version."""

_PLANNED_BACKENDS = ("triton", "flydsl")


@dataclass(frozen=True)
class Settings:
    """Parsed settings of this process.

    mode: ``auto``, ``off`` or ``require``; backend: one of :data:`BACKENDS`;
    warmup_jobs: number of processes or None for the default; paths are absolute.
    """

    mode: str
    backend: str
    fusion: bool
    warmup: bool
    warmup_jobs: int | None
    cache_dir: Path
    tuning: Path | None
    report: Path | None


@dataclass(frozen=True)
class Variable:
    """One environment variable. ``in_compile_key``: does a change of its value change
    what a compiled graph may contain? Only those take part in vLLM's compile key."""

    name: str
    default: str
    legal: str
    in_compile_key: bool


MODE = Variable(PREFIX, "auto", "auto, off, require", True)
BACKEND = Variable(f"{PREFIX}_BACKEND", "auto", ", ".join(BACKENDS), True)
FUSION = Variable(f"{PREFIX}_FUSION", "1", "0, 1", True)
WARMUP = Variable(f"{PREFIX}_WARMUP", "1", "0, 1", False)
WARMUP_JOBS = Variable(f"{PREFIX}_WARMUP_JOBS", "", "an integer of at least 1", False)
CACHE_DIR = Variable(f"{PREFIX}_CACHE_DIR", "", "the path of a directory", False)
TUNING = Variable(f"{PREFIX}_TUNING", "", "the path of a readable file", True)
REPORT = Variable(f"{PREFIX}_REPORT", "", "the path of a file to write", False)

VARIABLES = (MODE, BACKEND, FUSION, WARMUP, WARMUP_JOBS, CACHE_DIR, TUNING, REPORT)

ABI_KEY = f"{PREFIX}_ABI"
"""Name under which the layout ABI takes part in vLLM's compile key. Not a setting."""


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Parse and check every variable.

    Raises ValueError naming the variable, its value and the legal ones.
    """
    env = os.environ if environ is None else environ
    return Settings(
        mode=_choice(MODE, ("auto", "off", "require"), env),
        backend=_choice(BACKEND, BACKENDS, env),
        fusion=_choice(FUSION, ("0", "1"), env) == "1",
        warmup=_choice(WARMUP, ("0", "1"), env) == "1",
        warmup_jobs=_positive_int(WARMUP_JOBS, env),
        cache_dir=_directory(CACHE_DIR, env),
        tuning=_readable_file(TUNING, env),
        report=_writable_file(REPORT, env),
    )


def mode() -> str:
    """Current mode, unchecked: :func:`read` has checked it at start."""
    return _raw(MODE, os.environ)


def backend() -> str:
    """Current backend, unchecked. Cheap: the forward pass asks for it."""
    return _raw(BACKEND, os.environ)


def report_path() -> Path | None:
    """Where the report goes, unchecked: writing it will tell."""
    return _path(REPORT, os.environ)


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables with our prefix that do not exist -> the nearest existing name."""
    env = os.environ if environ is None else environ
    names = [v.name for v in VARIABLES]
    found = [n for n in env if n not in names and n.startswith(f"{PREFIX}_")]
    return {n: difflib.get_close_matches(n, names, n=1, cutoff=0.0)[0] for n in found}


def register_with_vllm() -> bool:
    """Add our variables to vLLM's environment table, hence to its compile key.

    vLLM reloads a compiled graph without asking which kernel traced it; what may
    change the graph must therefore be part of the key. Getters of the others return
    a constant, so that a change of path recompiles nothing. None of them raises: vLLM
    drops a getter that does from the key. Returns False when ``vllm.envs`` has not
    been imported or has no table.
    """
    vllm_envs = sys.modules.get("vllm.envs")
    table = getattr(vllm_envs, "environment_variables", None)
    if not isinstance(table, dict):
        return False
    for variable in VARIABLES:
        table[variable.name] = _getter(variable)
    table[ABI_KEY] = lambda: f"{LAYOUT_ABI}/{'ours' if _kernel_selected else 'none'}"
    return True


def mark_kernel_selected(selected: bool = True) -> None:
    """Record whether vLLM has chosen our kernel for the model of this process.

    The same settings can lead to another kernel, for instance after a library was mended
    or another plugin came along. vLLM computes its compile key after it has built the
    model, so what was really chosen can be part of it.
    """
    global _kernel_selected
    _kernel_selected = selected


_kernel_selected = False


def _getter(variable: Variable) -> Callable[[], str]:
    if variable is TUNING:
        return _tuning_digest
    if not variable.in_compile_key:
        return lambda: ""
    return lambda: _raw(variable, os.environ)


def _tuning_digest() -> str:
    path = _raw(TUNING, os.environ)
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(os.path.expanduser(path)).read_bytes()).hexdigest()
    except Exception as error:
        return f"unreadable: {type(error).__name__}"


def _raw(variable: Variable, env: Mapping[str, str]) -> str:
    return env.get(variable.name, "") or variable.default


def _illegal(variable: Variable, value: str, why: str = "") -> ValueError:
    default = f" (default {variable.default})" if variable.default else ""
    because = f": {why}" if why else ""
    return ValueError(
        f"{variable.name}={value!r} is not legal{because}. Legal: {variable.legal}{default}. "
        f"Set one of these or unset {variable.name}."
    )


def _choice(variable: Variable, legal: tuple[str, ...], env: Mapping[str, str]) -> str:
    value = _raw(variable, env)
    if value in legal:
        return value
    planned = variable is BACKEND and value in _PLANNED_BACKENDS
    raise _illegal(variable, value, "not implemented in this version" if planned else "")


def _positive_int(variable: Variable, env: Mapping[str, str]) -> int | None:
    value = _raw(variable, env)
    if not value:
        return None
    # More digits than any machine has CPUs; Python refuses to parse thousands of them.
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value) >= 1):
        raise _illegal(variable, value)
    return int(value)


def _path(variable: Variable, env: Mapping[str, str]) -> Path | None:
    value = _raw(variable, env)
    return Path(os.path.abspath(os.path.expanduser(value))) if value else None


def _directory(variable: Variable, env: Mapping[str, str]) -> Path:
    path = _path(variable, env)
    if path is None:
        base = env.get("XDG_CACHE_HOME", "") or os.path.expanduser("~/.cache")
        return Path(os.path.abspath(base)) / "vllm_rocm_mxfp8"
    try:
        if _exists(path) and not path.is_dir():
            raise _illegal(variable, str(path), "it is not a directory")
    except OSError as error:
        raise _illegal(variable, str(path), _reason(error)) from None
    return path


def _readable_file(variable: Variable, env: Mapping[str, str]) -> Path | None:
    path = _path(variable, env)
    if path is None:
        return None
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise _illegal(variable, str(path), _reason(error)) from None


def _writable_file(variable: Variable, env: Mapping[str, str]) -> Path | None:
    path = _path(variable, env)
    if path is None:
        return None
    try:
        if _exists(path) and path.is_dir():
            raise _illegal(variable, str(path), "it is a directory")
    except OSError as error:
        raise _illegal(variable, str(path), _reason(error)) from None
    return path


def _exists(path: Path) -> bool:
    """Raises OSError where the path cannot come to exist: a name too long, a parent that
    is a file or that may not be searched."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
