"""What happens once a worker's weights are final: log lines, the report, ``require``."""

import functools
import types
from collections import Counter
from importlib import metadata
from typing import Any

from vllm_rocm_mxfp8 import capability, envs, layout, process, report
from vllm_rocm_mxfp8._version import __version__
from vllm_rocm_mxfp8.compat import vllm as compat
from vllm_rocm_mxfp8.log import logger

_MARK = "_rocm_mxfp8_original"


def observe(worker_module: types.ModuleType) -> None:
    """Wrap ``Worker.load_model``. The original is kept on the wrapper; twice is once.

    A vLLM without such a method gets a warning, and under ``require`` the kernel refuses to
    serve, because nobody could check the result.
    """
    worker = compat.probe_worker(worker_module)
    if isinstance(worker, str):
        words = (
            f"this vLLM is not one that vllm-rocm-mxfp8 {__version__} knows "
            f"(vllm {compat.vllm_version()}): {worker}"
        )
        if process.unobserved() != words:
            process.set_unobserved(words)
            logger.warning("%s; no report after loading", words)
        return
    original = worker.load_model  # type: ignore[attr-defined]
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        envs.mark_kernel_selected(False)
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

    class_name = type(kernel).__name__
    n, k = (int(size) for size in kernel.config.weight_shape)
    try:
        block = layout.scale_block(layer.weight_scale, n, k)
    except (AttributeError, ValueError):
        # Another kernel's own layout.
        block = ""
    if class_name != KERNEL_NAME:
        verdict = process.verdict()
        if verdict.ok:
            verdict = process.last_model_verdict()
        if verdict.ok:
            why = compat.not_selected_because(KERNEL_NAME)
            verdict = capability.Verdict(False, "not_selected", why)
        return report.Row(
            name, n, k, block, class_name, False, class_name, verdict.code, verdict.text
        )
    if layer.weight.ndim == 3:
        reference = envs.backend() == "reference"
        place = "the reference backend" if reference else "AITER's FlyDSL"
        return report.Row(name, n, k, block, class_name, True, place)
    from vllm_rocm_mxfp8.kernels.linear import parent_serves

    # A weight-cache consumer never processed the weight; the shapes still tell.
    arrived = capability.Verdict(False, "row_major", "the weight arrived row-major")
    verdict = getattr(kernel, "verdict", arrived)
    place = "vLLM's own kernel" if parent_serves() else "the row-major torch path"
    return report.Row(name, n, k, block, class_name, False, place, verdict.code, verdict.text)


def _after_success(worker: Any) -> None:
    try:
        rows = collect(worker)
        rank = compat.worker_rank(worker)
    except Exception as error:
        words = f"no report after loading: {type(error).__name__}: {error}"
        logger.warning("%s", words)
        if envs.mode() == "require":
            raise RuntimeError(f"VLLM_ROCM_MXFP8=require, but {words}") from error
        return
    if not rows:
        return
    active = any(r.ours for r in rows)
    if rank == 0:
        logger.info("%s", active_line() if active else inactive_line(rows))
        logger.info("%s", report.summary(rows))
    _write_report(rank, rows, active)
    if envs.mode() == "require" and not active:
        raise RuntimeError(
            f"VLLM_ROCM_MXFP8=require, but none of {len(rows)} MXFP8 linears is ours: "
            f"{report.summary(rows)}. Mend the reason, or set VLLM_ROCM_MXFP8=auto."
        )


def _write_report(rank: int, rows: list[report.Row], active: bool) -> None:
    path = envs.report_path()
    if path is None:
        return
    header = {"active": active, "mode": envs.mode(), "backend": envs.backend(), **versions()}
    try:
        report.write(path, rank, rows, header)
    except OSError as error:
        logger.warning("VLLM_ROCM_MXFP8_REPORT=%s cannot be written: %s", path, error)


def _after_failure(error: Exception) -> None:
    """vLLM fails to load an MXFP8 model where no kernel is left; say what we know."""
    verdict = process.verdict()
    if verdict.ok or "MXFP8" not in str(error):
        return
    if envs.mode() == "require":
        raise RuntimeError(
            f"VLLM_ROCM_MXFP8=require, but not active: {verdict.text}. "
            "Mend the reason, or set VLLM_ROCM_MXFP8=auto."
        ) from error
    logger.warning("not active: %s; and vLLM found no kernel of its own", verdict.text)


def active_line() -> str:
    """The line to look for in the log."""
    facts = process.facts()
    listed = versions()
    is_reference = facts.backend == "reference"
    # The reference backend is plain torch: other libraries' versions would mislead.
    libraries = ("vllm",) if is_reference else ("vllm", "aiter", "flydsl")
    names = ", ".join(f"{name} {listed[name]}" for name in libraries if listed[name])
    ahead = " ahead of RocmDotScaledMxfp8LinearKernel" if facts.platform == "rocm" else ""
    machine = compat.gpu_arch() or facts.platform
    backend = "reference backend, " if is_reference else ""
    return f"active: AiterMxfp8LinearKernel{ahead} ({machine}, {backend}{names})"


def inactive_line(rows: list[report.Row]) -> str:
    """Its counterpart, with the most frequent reason and who serves instead."""
    reason = Counter(r.reason for r in rows).most_common(1)[0][0]
    torch_serves = any(r.runs_on == "the row-major torch path" for r in rows)
    who = "plain torch serves" if torch_serves else "vLLM's own kernels serve"
    return f"not active: {reason}; {who}"


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
