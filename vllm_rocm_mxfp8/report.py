"""What became of every MXFP8 linear: rows, the summary line, a table and JSON."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_REASONS_IN_SUMMARY = 4


@dataclass(frozen=True)
class Row:
    """One linear. n, k per rank; block: ``32x32``, ``1x32`` or ''; kernel: class name;
    runs_on: what computes it, in words; code, reason: empty when it is ours."""

    layer: str
    n: int
    k: int
    block: str
    kernel: str
    ours: bool
    runs_on: str
    code: str = ""
    reason: str = ""


def summary(rows: Sequence[Row]) -> str:
    """``312 of 373 MXFP8 linears on FlyDSL (6 shapes); 61 on vLLM's Triton: why (61)``."""
    ours = [r for r in rows if r.ours]
    parts = []
    for place, count in Counter(r.runs_on for r in ours).most_common():
        shapes = len({(r.n, r.k, r.block) for r in ours if r.runs_on == place})
        parts.append(
            f"{count} of {len(rows)} MXFP8 linears on {place} "
            f"({shapes} shape{'' if shapes == 1 else 's'})"
        )
    if not ours:
        parts.append(f"0 of {len(rows)} MXFP8 linears")
    for place, count in Counter(r.runs_on for r in rows if not r.ours).most_common():
        reasons = Counter(r.reason for r in rows if not r.ours and r.runs_on == place)
        named = [f"{text} ({n})" for text, n in reasons.most_common(_REASONS_IN_SUMMARY)]
        if len(reasons) > _REASONS_IN_SUMMARY:
            named.append(f"{len(reasons) - _REASONS_IN_SUMMARY} more reasons")
        parts.append(f"{count} on {place}: {', '.join(named)}")
    return "; ".join(parts)


def table(rows: Sequence[Row]) -> str:
    """Plain-text table, one line per linear."""
    head = ("layer", "N", "K", "block", "runs on", "reason")
    body = [(r.layer, str(r.n), str(r.k), r.block, r.runs_on, r.reason) for r in rows]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [head, tuple("-" * w for w in widths), *body]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i in (1, 2) else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def rank_path(path: Path, rank: int) -> Path:
    """``report.json`` -> ``report.rank0.json``."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")


def write(path: Path, rank: int, rows: Sequence[Row], header: dict[str, object]) -> Path:
    """Write this rank's JSON report; readers never see half a file. Raises OSError."""
    target = rank_path(path, rank)
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {
        **header,
        "rank": rank,
        "summary": summary(rows),
        "layers": [asdict(r) for r in rows],
    }
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(target)
    return target
