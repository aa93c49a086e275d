"""What happens once a worker's weights are final: log lines, the report, ``require``."""

import functools
import types
from importlib import metadata
from typing import Any

from vllm_rocm_mxfp8 import capability, envs, layout, process, report
from vllm_rocm_mxfp8._version import __version__
from vllm_rocm_mxfp8.compat import vllm as compat
from vllm_rocm_mxfp8.log import logger

_MARK = "_rocm_mxfp8_original"


def observe(worker_module: types.ModuleType) -> None:
    """Wrap ``Worker.load_model``. The original is kept on the wrapper; twice is once.

    Raises RuntimeError only if this vLLM has no such method and the mode is ``require``.
    """
    worker = compat.probe_worker(worker_module)
    if isinstance(worker, str):
        words = (
            f"this vLLM is not one that vllm-rocm-mxfp8 {__version__} knows "
            f"(vllm {compat.vllm_version()}): {worker}"
        )
        logger.warning("%s; no report after loading", words)
        if envs.read().mode == "require":
            raise RuntimeError(f"VLLM_ROCM_MXFP8=require, but {words}")
        return
    original = worker.load_model  # type: ignore[attr-defined]
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *args, **kwargs)
        except Exception as error:
            _after_failure(error)
            raise
        _after_success(self)
        return result

    setattr(load_model, _MARK, original)
    worker.load_model = load_model  # type: ignore[attr-defined]


def collect(worker: Any) -> list[report.Row]:
    """A row for every MXFP8 linear of a loaded worker, draft model included."""
    return [
        _row(prefix + name, layer, kernel)
        for prefix, model in compat.loaded_models(worker)
        for name, layer, kernel in compat.mxfp8_linears(model)
    ]


def _row(name: str, layer: Any, kernel: Any) -> report.Row:
    from vllm_rocm_mxfp8.registry import KERNEL_NAME

    n, k = kernel.config.weight_shape
    weight, scale = layer.weight, layer.weight_scale
    class_name = type(kernel).__name__
    is_ours = class_name == KERNEL_NAME and weight.ndim == 3
    try:
        block = layout.scale_block(scale, n, k)
    except ValueError:
        block = ""
    if is_ours:
        return report.Row(name, n, k, block, class_name, True, "the reference backend")
    if class_name != KERNEL_NAME:
        verdict = process.verdict()
        text = verdict.text or f"vLLM selected {class_name}"
        place = class_name
    else:
        # A weight-cache consumer never processed the weight; the shapes still tell.
        fallback = capability.Verdict(False, "row_major", "the weight arrived row-major")
        verdict = getattr(kernel, "verdict", fallback)
        text = verdict.text or fallback.text
        place = "vLLM's own kernel" if compat.is_rocm() else "the row-major torch path"
    return report.Row(name, n, k, block, class_name, False, place, verdict.code, text)


def _after_success(worker: Any) -> None:
    settings = envs.read()
    try:
        rows = collect(worker)
    except Exception as error:
        logger.warning("no report after loading: %s: %s", type(error).__name__, error)
        if settings.mode == "require":
            raise
        return
    if not rows:
        return
    rank = compat.worker_rank(worker)
    active = any(r.ours for r in rows)
    if rank == 0:
        logger.info("%s", active_line() if active else inactive_line(rows[0].reason))
        logger.info("%s", report.summary(rows))
    if settings.report is not None:
        header = {
            "active": active,
            "mode": settings.mode,
            "backend": settings.backend,
            **versions(),
        }
        try:
            report.write(settings.report, rank, rows, header)
        except OSError as error:
            logger.warning(
                "VLLM_ROCM_MXFP8_REPORT=%s cannot be written: %s", settings.report, error
            )
    if settings.mode == "require" and not active:
        raise RuntimeError(
            f"VLLM_ROCM_MXFP8=require, but none of {len(rows)} MXFP8 linears is ours: "
            f"{report.summary(rows)}. Mend the reason, or set VLLM_ROCM_MXFP8=auto."
        )


def _after_failure(error: Exception) -> None:
    """vLLM fails to load an MXFP8 model where no kernel is left; say what we know."""
    verdict = process.verdict()
    if verdict.ok or "MXFP8" not in str(error):
        return
    if envs.read().mode == "require":
        raise RuntimeError(
            f"VLLM_ROCM_MXFP8=require, but not active: {verdict.text}. "
            "Mend the reason, or set VLLM_ROCM_MXFP8=auto."
        ) from error
    logger.warning("%s", inactive_line(verdict.text))


def active_line() -> str:
    """The line to look for in the log."""
    facts = process.facts()
    listed = versions()
    names = ", ".join(
        f"{name} {listed[name]}" for name in ("vllm", "aiter", "flydsl") if listed[name]
    )
    ahead = " ahead of RocmDotScaledMxfp8LinearKernel" if facts.platform == "rocm" else ""
    backend = f"{facts.backend} backend, " if facts.backend == "reference" else ""
    return f"active: AiterMxfp8LinearKernel{ahead} ({facts.platform}, {backend}{names})"


def inactive_line(reason: str) -> str:
    """Its counterpart, with the reason."""
    return f"not active: {reason}; vLLM's own kernels serve"


def versions() -> dict[str, str]:
    """Installed versions, '' where a package is missing."""
    found = {"vllm": compat.vllm_version(), "vllm_rocm_mxfp8": __version__}
    for name, distributions in (("aiter", ("amd-aiter", "aiter")), ("flydsl", ("flydsl",))):
        found[name] = ""
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found
