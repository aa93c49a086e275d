"""Which AITERs can be simulated, and what is recorded of each call."""

from dataclasses import dataclass

GEMM = "gemm_a8w8_blockscale_bpreshuffle"
"""Torch op and Python symbol."""
FAULTS = ("swapped_scale", "unshuffled")
"""Deliberately wrong kernels. A test that passes with one of these tests nothing.

``swapped_scale`` reads w_scale's buffer as [K/32, rows]; it cannot show with a single row or
column of scales, nor, on a square grid, where the diagonal dominates. ``unshuffled`` reads
the weight's bytes as row-major."""

GENERATIONS = ("v2", "v1", "old")

# The words that section 6 quotes for each way an installation is broken.
IMPORT_ERRORS = {
    "ImportError": (ImportError, "cannot import name 'SMEM_CAPACITY_MAP' from 'flydsl'"),
    "RuntimeError": (RuntimeError, "Get GPU arch from rocminfo failed"),
    "AssertionError": (AssertionError, "Could not find hipcc"),
    "OSError": (OSError, "libamdhip64.so.7: cannot open shared object file"),
}
BROKEN = (*IMPORT_ERRORS, "no_op", "csv", "lookup_raises", "flydsl")


def import_error(name: str) -> Exception:
    kind, text = IMPORT_ERRORS[name]
    return kind(text)


class SilentlyWrong(RuntimeError):
    """Only in the double: AITER would read these bytes as something else and go on."""


@dataclass(frozen=True)
class Spec:
    """Which AITER is simulated; :func:`aiter_double.install` describes the fields."""

    generation: str = "v2"
    broken: str | None = None
    table: str | None = None
    cu_num: int = 256
    gfx: str = "gfx950"
    version: str | None = "0.1.28"
    supports_1x32: bool | str = False
    rows_1x32: tuple[tuple, ...] = ()
    fault: str | None = None
    without: tuple[str, ...] = ()
    calls_file: str | None = None

    def __post_init__(self):
        for field, legal in (
            ("generation", GENERATIONS),
            ("broken", (None, *BROKEN)),
            ("fault", (None, *FAULTS)),
            ("supports_1x32", (False, True, "probe_only")),
        ):
            if getattr(self, field) not in legal:
                raise ValueError(f"{field}={getattr(self, field)!r}, legal: {legal}")


@dataclass(frozen=True)
class Call:
    """One call of a GEMM entry point, also when it was refused.

    op: entry point; path: ``bmm``, ``mxpsh``, ``group32``, ``widened``, ``fp32`` or ''
    when refused before routing; shapes and dtypes: of XQ, WQ, x_scale, w_scale; kernel:
    name of the kernel ('' if none was chosen); tuned: it came from a table row; launched:
    a kernel would have run on the GPU; error: ``Type: text`` of what was raised, or ''.
    """

    op: str
    path: str
    m: int
    n: int
    k: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    out_dtype: str
    w_scale_block: str = ""
    kernel: str = ""
    tuned: bool = False
    launched: bool = False
    error: str = ""
