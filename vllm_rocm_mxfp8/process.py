"""Facts of this process, gathered for :mod:`capability` to judge."""

from vllm_rocm_mxfp8 import capability, envs
from vllm_rocm_mxfp8.compat import vllm as compat

_host_problem = ""
_unobserved = ""


def set_host_problem(reason: str) -> None:
    """Record why this vLLM cannot take our kernel ('' for: it can)."""
    global _host_problem
    _host_problem = reason


def host_problem() -> str:
    """The recorded reason, or ''."""
    return _host_problem


def set_unobserved(reason: str) -> None:
    """Record why the end of loading cannot be observed, hence not checked."""
    global _unobserved
    _unobserved = reason


def unobserved() -> str:
    """The recorded reason, or ''."""
    return _unobserved


def facts() -> capability.Process:
    """Current facts. Settings are read anew: they are few, and tests change them."""
    platform = compat.current_platform()
    return capability.Process(
        mode=envs.mode(),
        backend=envs.backend(),
        platform="unknown" if isinstance(platform, str) else platform[1],
        batch_invariant=compat.batch_invariant(),
        host_problem=_host_problem,
    )


def verdict() -> capability.Verdict:
    """May our kernel serve in this process?"""
    return capability.check_process(facts())


def model_verdict() -> capability.Verdict:
    """May it serve the model that vLLM is building?"""
    return capability.check_model(capability.Model(monokernel=compat.monokernel()))
