"""What can run where: pure decisions, standard library only.

The selector, the loader and the launcher all ask this module, so that a layer is
never accepted by one and refused by another. Every refusal has a stable ``code``
(for machines) and a ``text`` (for people).
"""

from dataclasses import dataclass

TILE_N = 16
"""Rows of one preshuffled weight tile."""
TILE_K = 32
"""Columns of one preshuffled weight tile, and of one E8M0 scale block (OCP MX v1.0)."""


@dataclass(frozen=True)
class Verdict:
    """``ok``: ours. ``code``: stable reason code. ``text``: reason in words ('' if ok)."""

    ok: bool
    code: str
    text: str = ""


OK = Verdict(True, "ok")


@dataclass(frozen=True)
class Process:
    """Facts that hold for a whole process.

    mode, backend: settings; platform: ``rocm``, ``cpu``, ``cuda``, ...; arch: of the GPU,
    like ``gfx950``; batch_invariant: ``VLLM_BATCH_INVARIANT``. Each of the others is a
    reason, or '': host_problem: why this vLLM cannot take our kernel; aiter_off: which of
    vLLM's switches keeps AITER's linears off; aiter_problem: what AITER lacks.
    """

    mode: str
    backend: str
    platform: str
    arch: str
    batch_invariant: bool
    host_problem: str = ""
    aiter_off: str = ""
    aiter_problem: str = ""


@dataclass(frozen=True)
class Model:
    """Facts of the model being built. dtype: like ``bfloat16``, '' if unknown; monokernel:
    which switch makes vLLM read the weights of whole layers itself, or ''."""

    dtype: str = ""
    monokernel: str = ""


@dataclass(frozen=True)
class Layer:
    """Facts of one linear. N, K per rank; block: ``32x32`` or ``1x32``; tuned_1x32: AITER's
    table has rows for this shape with 1x32 scales; runs_1x32: AITER says it can run them.
    read_elsewhere: who reads its weight outside the linear, or ''; problem: what is wrong
    with its loaded tensors, or ''."""

    n: int
    k: int
    block: str = "1x32"
    tuned_1x32: bool = False
    runs_1x32: bool = False
    read_elsewhere: str = ""
    problem: str = ""


def check_process(process: Process) -> Verdict:
    """May our kernel serve in this process at all?"""
    if process.mode == "off":
        return Verdict(False, "off", "VLLM_ROCM_MXFP8=off")
    if process.host_problem:
        return Verdict(False, "host", process.host_problem)
    if process.backend != "reference":
        if process.platform != "rocm":
            return Verdict(
                False,
                "platform",
                f"platform is {process.platform}, not ROCm "
                "(VLLM_ROCM_MXFP8_BACKEND=reference runs anywhere, slowly)",
            )
        if process.arch != "gfx950":
            arch = process.arch or "unknown"
            return Verdict(False, "arch", f"the GPU is {arch}, and the kernels need gfx950")
        if process.aiter_off:
            return Verdict(False, "aiter_off", process.aiter_off)
    if process.batch_invariant:
        return Verdict(
            False, "batch_invariant", "VLLM_BATCH_INVARIANT=1, which this kernel cannot promise"
        )
    if process.backend != "reference" and process.aiter_problem:
        return Verdict(False, "aiter", process.aiter_problem)
    return OK


def check_model(model: Model, backend: str) -> Verdict:
    """May our kernel serve this model?"""
    if model.monokernel:
        return Verdict(
            False, "monokernel", f"{model.monokernel} reads the weights outside the linears"
        )
    if backend != "reference" and model.dtype not in ("", "bfloat16"):
        return Verdict(
            False, "dtype", f"the model's dtype is {model.dtype}, and AITER computes bfloat16"
        )
    return OK


def check_layer(layer: Layer, backend: str) -> Verdict:
    """May this linear's weight be preshuffled and served by ``backend``?"""
    if layer.read_elsewhere:
        return Verdict(False, "read_elsewhere", layer.read_elsewhere)
    if layer.problem:
        return Verdict(False, "tensors", layer.problem)
    tile_n, tile_k = (TILE_N, TILE_K) if backend == "reference" else (32, 64)
    if layer.n <= 0 or layer.n % tile_n:
        return Verdict(False, "n_tile", f"N={layer.n} is not a multiple of {tile_n}")
    if layer.k <= 0 or layer.k % tile_k:
        return Verdict(False, "k_tile", f"K={layer.k} is not a multiple of {tile_k}")
    if backend == "reference" or layer.block == "32x32":
        return OK
    if backend == "aiter":
        if layer.runs_1x32:
            return OK
        return Verdict(False, "1x32", "this AITER has no kernel for 1x32 scales")
    if layer.tuned_1x32:
        return OK
    return Verdict(False, "1x32", "AITER's table has no rows for 1x32 scales of this shape")
