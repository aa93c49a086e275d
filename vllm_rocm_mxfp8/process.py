"""Facts of this process, gathered for :mod:`capability` to judge."""

import threading

from vllm_rocm_mxfp8 import capability, envs
from vllm_rocm_mxfp8.compat import vllm as compat

_lock = threading.Lock()
_host_problem = ""


def set_host_problem(reason: str) -> None:
    """Record why this vLLM cannot take our kernel."""
    global _host_problem
    with _lock:
        _host_problem = reason


def host_problem() -> str:
    """The recorded reason, or ''."""
    return _host_problem


def facts() -> capability.Process:
    """Current facts. Reads settings anew: they are few, and tests change them."""
    settings = envs.read()
    platform = compat.current_platform()
    return capability.Process(
        mode=settings.mode,
        backend=settings.backend,
        platform="unknown" if isinstance(platform, str) else platform[1],
        batch_invariant=compat.batch_invariant(),
        host_problem=_host_problem,
    )


def verdict() -> capability.Verdict:
    """May our kernel serve in this process?"""
    return capability.check_process(facts())
