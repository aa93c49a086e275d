"""Put our kernel into vLLM's lists, and take it out again."""

import types
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_rocm_mxfp8 import envs, process
from vllm_rocm_mxfp8._version import __version__
from vllm_rocm_mxfp8.compat import vllm as compat
from vllm_rocm_mxfp8.log import logger

KERNEL_NAME = "AiterMxfp8LinearKernel"
"""Class name of our kernel. User API: ``VLLM_DISABLED_KERNELS`` takes it."""


def install(kernel_list: types.ModuleType) -> bool:
    """Insert our kernel first in the current platform's MXFP8 list.

    Called when vLLM has imported its kernel list. On ROCm always (the kernel's
    ``is_supported`` decides when a model needs it), elsewhere only for the reference
    backend, which creates the list where there is none. Foreign entries keep their
    order; a second call changes nothing. Returns whether our kernel is in the list. A
    vLLM whose symbols have moved is left untouched, with one warning.
    """
    try:
        return _install(kernel_list)
    except Exception as error:
        _decline(f"inserting the kernel failed with {type(error).__name__}: {error}")
        return False


def _install(kernel_list: types.ModuleType) -> bool:
    host = compat.probe_host(kernel_list)
    platform = compat.current_platform()
    if isinstance(host, str) or isinstance(platform, str):
        reason = host if isinstance(host, str) else str(platform)
        _decline(
            f"this vLLM is not one that vllm-rocm-mxfp8 {__version__} knows "
            f"(vllm {compat.vllm_version()}): {reason}"
        )
        return False
    key, name = platform
    if name != "rocm" and envs.backend() != "reference":
        return False
    listed = host.kernels.get(key, [])
    for entry in listed:
        if getattr(entry, "__name__", "") == KERNEL_NAME:
            ours = entry.__module__.startswith("vllm_rocm_mxfp8.")
            if not ours:
                _decline(
                    f"vllm {compat.vllm_version()} ships its own {KERNEL_NAME} "
                    f"({entry.__module__}); the plugin steps aside"
                )
            return ours
    from vllm_rocm_mxfp8.kernels.linear import kernel_class

    kernel = kernel_class()
    host.kernels.setdefault(key, []).insert(0, kernel)
    # A backend with a mapped kernel has no fallback outside its set: without the other
    # two, `--linear-backend aiter` could not load where ours is unsupported.
    host.backend_map.setdefault("aiter", set()).update(
        {kernel, host.rocm_kernel, host.emulation}
    )
    host.backend_map.setdefault("triton", set()).add(host.rocm_kernel)
    process.set_host_problem("")
    return True


@contextmanager
def registered(kernel_list: types.ModuleType) -> Iterator[type]:
    """Our kernel inside vLLM's lists for the length of a ``with`` block.

    Yields the class. Raises RuntimeError if it cannot be inserted. Leaves the lists as
    they were, also when the plugin had already been installed.
    """
    from vllm_rocm_mxfp8.kernels.linear import kernel_class

    host = compat.probe_host(kernel_list)
    if isinstance(host, str):
        raise RuntimeError(host)
    before = ({k: list(v) for k, v in host.kernels.items()}, _copy(host.backend_map))
    try:
        if not install(kernel_list):
            raise RuntimeError(process.host_problem() or process.verdict().text)
        yield kernel_class()
    finally:
        _restore(host.kernels, before[0])
        _restore(host.backend_map, before[1])


def _copy(table: dict[str, set[type]]) -> dict[str, set[type]]:
    return {name: set(kernels) for name, kernels in table.items()}


def _restore(table: dict, before: dict) -> None:  # type: ignore[type-arg]
    """In place: vLLM's modules hold references to the containers."""
    for name in list(table):
        if name not in before:
            del table[name]
    for name, kernels in before.items():
        if isinstance(table[name], list):
            table[name][:] = kernels
        else:
            table[name].clear()
            table[name].update(kernels)


def _decline(reason: str) -> None:
    if process.host_problem() != reason:
        process.set_host_problem(reason)
        logger.warning("not active: %s; vLLM's own kernels serve", reason)
