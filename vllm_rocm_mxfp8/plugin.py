"""The two entry points. Both are light: no torch, no GPU context, no aiter, no flydsl."""

import types

from vllm_rocm_mxfp8 import envs, hooks
from vllm_rocm_mxfp8.compat import vllm as compat
from vllm_rocm_mxfp8.log import logger

_reported: set[str] = set()


def register() -> None:
    """Entry point of ``vllm.general_plugins``: switch the plugin on as the settings say.

    vLLM calls it in every process, possibly more than once. Raises ValueError for an
    illegal setting and nothing else: whatever does not fit this vLLM becomes a reason.
    """
    settings = envs.read()
    for name, nearest in envs.unknown_variables().items():
        _warn_once(
            f"{name} is not a setting of this plugin and has no effect; did you mean {nearest}?"
        )
    _install(settings)


def arm() -> None:
    """Entry point of ``vllm.platform_plugins``: install without becoming the platform.

    Weight-cache daemons resolve the platform but load no general plugins; without this
    the daemon would lay weights out for another kernel than the engine's. Always returns
    None. vLLM swallows exceptions here, so an illegal setting is logged.
    """
    try:
        settings = envs.read()
    except ValueError as error:
        _error_once(str(error))
        return
    _install(settings)


def _install(settings: envs.Settings) -> None:
    hooks.on_import(compat.ENVS_MODULE, _register_settings)
    if settings.mode != "off":
        hooks.on_import(compat.KERNEL_LIST_MODULE, _install_kernel)
    hooks.on_import(compat.WORKER_MODULE, _observe_worker)


def _register_settings(_module: types.ModuleType) -> None:
    if not envs.register_with_vllm():
        _warn_once(
            f"vllm.envs.environment_variables is missing (vllm {compat.vllm_version()}): the "
            "plugin's settings are not part of vLLM's compile key; clear VLLM_CACHE_ROOT "
            "whenever you switch the plugin"
        )


def _install_kernel(module: types.ModuleType) -> None:
    from vllm_rocm_mxfp8 import registry

    registry.install(module)


def _observe_worker(module: types.ModuleType) -> None:
    from vllm_rocm_mxfp8 import after_load

    after_load.observe(module)


def _warn_once(message: str) -> None:
    if message not in _reported:
        _reported.add(message)
        logger.warning("%s", message)


def _error_once(message: str) -> None:
    if message not in _reported:
        _reported.add(message)
        logger.error("not active: %s", message)
