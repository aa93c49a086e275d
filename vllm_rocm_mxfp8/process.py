"""Facts of this process, gathered for :mod:`capability` to judge."""

from dataclasses import replace

from vllm_rocm_mxfp8 import capability, envs
from vllm_rocm_mxfp8.compat import aiter
from vllm_rocm_mxfp8.compat import vllm as compat

_host_problem = ""
_unobserved = ""
_last_model_verdict = capability.OK


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
    """Current facts. Settings are read anew: they are few, and tests change them. AITER is
    imported only where everything else speaks for it."""
    platform = compat.current_platform()
    known = capability.Process(
        mode=envs.mode(),
        backend=envs.backend(),
        platform="unknown" if isinstance(platform, str) else platform[1],
        arch=compat.gpu_arch(),
        batch_invariant=compat.batch_invariant(),
        host_problem=_host_problem,
        aiter_off=compat.aiter_linear_off(),
    )
    if known.backend == "reference" or not capability.check_process(known).ok:
        return known
    found = aiter.probe()
    return replace(known, aiter_problem=found if isinstance(found, str) else "")


def verdict() -> capability.Verdict:
    """May our kernel serve in this process?"""
    return capability.check_process(facts())


def model_verdict() -> capability.Verdict:
    """May it serve the model that vLLM is building? Only then does vLLM know which."""
    global _last_model_verdict
    model = capability.Model(dtype=compat.model_dtype(), monokernel=compat.monokernel())
    _last_model_verdict = capability.check_model(model, envs.backend())
    return _last_model_verdict


def last_model_verdict() -> capability.Verdict:
    """The answer that :func:`model_verdict` gave last."""
    return _last_model_verdict
