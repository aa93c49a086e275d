"""The only place that names a symbol of AITER.

Nothing of AITER is imported before :func:`probe` is called, and no exception leaves it:
AITER's import can fail in many ways (missing ROCm files, another FlyDSL, an ABI skew),
and then vLLM's own kernels serve.

Ledger: symbol | why | can go when
------ | --- | ---
``aiter.ops.gemm_op_a8w8.gemm_a8w8_blockscale_bpreshuffle`` | the GEMM on preshuffled
  weights | never
``...get_mxscale_bpreshuffle_config`` | tells an AITER that reads E8M0 scales from one
  that silently widens them to float32 and computes garbage; says whether a shape is tuned.
  Four parameters in its first generation, five in the second | AITER has a public probe
``bmm_a8w8_mxfp8_supported`` | whether a kernel reads 1x32 scales | the same
"""

import functools
import importlib
import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from vllm_rocm_mxfp8.log import logger as log

_GEMM_MODULE = "aiter.ops.gemm_op_a8w8"
_LOOKUP = "get_mxscale_bpreshuffle_config"
_GEMM = "gemm_a8w8_blockscale_bpreshuffle"
_PROBE_1X32 = "bmm_a8w8_mxfp8_supported"
_PROBE_MODULES = ("aiter.ops.flydsl.batched_gemm_a8w8", _GEMM_MODULE)


@dataclass(frozen=True)
class Aiter:
    """A usable AITER. version: of the distribution, or 'unknown'; gemm: the GEMM; lookup:
    ``(m, n, k, block) -> row or None``."""

    version: str
    gemm: Callable[..., Any]
    lookup: Callable[[int, int, int, str], Any]

    def is_tuned(self, n: int, k: int, block: str, tokens: tuple[int, ...]) -> bool:
        """Does the tuned table have a row for every token count? False if it cannot say."""
        try:
            return all(self.lookup(m, n, k, block) is not None for m in tokens)
        except Exception as error:
            kind = type(error).__name__
            _warn_once(
                f"AITER {self.version}: its tuned table cannot be read ({kind}: "
                f"{_first_line(error)}); linears with 1x32 scales stay on vLLM's kernel"
            )
            return False

    def reads_1x32(self) -> bool:
        """Does AITER say that it has a kernel for one scale per row?"""
        for module in _PROBE_MODULES:
            try:
                probe = getattr(importlib.import_module(module), _PROBE_1X32)
                return bool(probe("1x32", False))
            except Exception:
                continue
        return False


def installed_version() -> str:
    """Version of the installed AITER, or 'unknown'. Imports nothing of it."""
    for distribution in ("amd-aiter", "aiter"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def probe() -> Aiter | str:
    """Import AITER and check what we need of it, by capability and never by version.

    Returns an Aiter, or the reason why not, with its version. Once per process.
    """
    version = installed_version()
    try:
        module = importlib.import_module(_GEMM_MODULE)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "aiter":
            return "AITER is not installed"
        kind = type(error).__name__
        return f"AITER {version}: import failed with {kind}: {_first_line(error)}"
    lookup = getattr(module, _LOOKUP, None)
    if not callable(lookup):
        return (
            f"AITER {version} has no {_LOOKUP}: it would read E8M0 scales as float32. "
            "A newer AITER with the mxscale GEMM is needed"
        )
    gemm = getattr(module, _GEMM, None)
    if not callable(gemm):
        return f"AITER {version} has no {_GEMM}"
    try:
        parameters = inspect.signature(inspect.unwrap(lookup)).parameters
    except (TypeError, ValueError) as error:
        return f"AITER {version}: {_LOOKUP} cannot be inspected: {_first_line(error)}"
    if len(parameters) in (4, 5):
        _quieten_untuned_warnings()
    if len(parameters) == 4:
        return Aiter(version, gemm, lambda m, n, k, block: lookup(m, n, k, block))
    if len(parameters) == 5:
        # The fifth picks the rows of the batched kernel, the one that gfx950 runs.
        return Aiter(version, gemm, lambda m, n, k, block: lookup(m, n, k, block, True))
    return (
        f"AITER {version}: {_LOOKUP} takes ({', '.join(parameters)}), "
        "expected (m, n, k, w_scale_block[, bmm])"
    )


class _OncePerShape(logging.Filter):
    """AITER warns of an untuned shape once per M; a server meets thousands of them."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        found = re.search(r"\bN:\s*(\d+), K:\s*(\d+).*untuned", record.getMessage())
        if found is None:
            return True
        shape = (found[1], found[2])
        if shape in self._seen:
            return False
        self._seen.add(shape)
        return True


def _quieten_untuned_warnings() -> None:
    logger = logging.getLogger("aiter")
    if not any(isinstance(f, _OncePerShape) for f in logger.filters):
        logger.addFilter(_OncePerShape())


@functools.cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
