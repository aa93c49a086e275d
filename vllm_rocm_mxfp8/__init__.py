"""Out-of-tree vLLM plugin: fast MXFP8 linears on AMD gfx950.

vLLM finds :func:`register` and :func:`arm` through entry points. Importing this
package imports neither torch nor vllm; everything else is loaded on first use.
"""

from typing import Any

from vllm_rocm_mxfp8._version import __version__

__all__ = ["__version__", "arm", "register"]


def __getattr__(name: str) -> Any:
    if name in ("arm", "register"):
        from vllm_rocm_mxfp8 import plugin

        return getattr(plugin, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
