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

    mode, backend: settings; platform: ``rocm``, ``cpu``, ``cuda``, ...; batch_invariant:
    ``VLLM_BATCH_INVARIANT``; host_problem: why this vLLM cannot take our kernel, or ''.
    """

    mode: str
    backend: str
    platform: str
    batch_invariant: bool
    host_problem: str = ""


@dataclass(frozen=True)
class Model:
    """Facts of the model being built. monokernel: the switch under which vLLM reads the
    weights of whole layers itself, or ''."""

    monokernel: str = ""


@dataclass(frozen=True)
class Layer:
    """Facts of one linear. N, K per rank; read_elsewhere: who reads its weight outside
    the linear, or ''; problem: what is wrong with its loaded tensors, or ''."""

    n: int
    k: int
    read_elsewhere: str = ""
    problem: str = ""


def check_process(process: Process) -> Verdict:
    """May our kernel serve in this process at all?"""
    if process.mode == "off":
        return Verdict(False, "off", "VLLM_ROCM_MXFP8=off")
    if process.host_problem:
        return Verdict(False, "host", process.host_problem)
    if process.backend == "reference":
        if process.batch_invariant:
            return Verdict(
                False,
                "batch_invariant",
                "VLLM_BATCH_INVARIANT=1 and the reference backend does not promise it",
            )
        return OK
    if process.platform != "rocm":
        return Verdict(
            False,
            "platform",
            f"platform is {process.platform}, not ROCm "
            "(VLLM_ROCM_MXFP8_BACKEND=reference runs anywhere, slowly)",
        )
    return Verdict(
        False, "no_backend", "this version has no backend for ROCm yet, only 'reference'"
    )


def check_model(model: Model) -> Verdict:
    """May our kernel serve this model?"""
    if model.monokernel:
        return Verdict(
            False, "monokernel", f"{model.monokernel} reads the weights outside the linears"
        )
    return OK


def check_layer(layer: Layer, backend: str) -> Verdict:
    """May this linear's weight be preshuffled and served by ``backend``?"""
    if layer.read_elsewhere:
        return Verdict(False, "read_elsewhere", layer.read_elsewhere)
    if layer.problem:
        return Verdict(False, "tensors", layer.problem)
    if layer.n <= 0 or layer.n % TILE_N:
        return Verdict(False, "n_tile", f"N={layer.n} is not a multiple of {TILE_N}")
    if layer.k <= 0 or layer.k % TILE_K:
        return Verdict(False, "k_tile", f"K={layer.k} is not a multiple of {TILE_K}")
    if backend != "reference":
        return Verdict(False, "no_backend", f"backend {backend!r} is not implemented")
    return OK
