"""How a program used its modules, as plain data for the report."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from service.compilation.monitor.usage import Usage
from service.parallel.boundary import Held


def usage_rows(usage: Usage) -> dict[str, Any]:
    """Return ``invocations`` by module, phase, grad mode, thread and shape, ``lifetimes`` of results held over a
    replay, ``stale_reads`` of such results, ``results`` (how many were consumed, copied or held), ``marks`` by place,
    ``reentries``, ``stale_gradients``.
    """
    return {
        "invocations": [
            {
                "module": call.module,
                "phase": call.phase,
                "grad": call.grad,
                "thread": call.thread,
                "shape": " ".join(str(list(shape)) for shape in call.shapes),
                "calls": count,
                "per_step": count / max(usage.iterations, 1),
            }
            for call, count in usage.invocations.items()
        ],
        "lifetimes": [_held(each) for each in usage.held],
        "stale_reads": [
            _held(each.held) | {"iteration": each.iteration, "read_at": str(each.site)} for each in usage.reads
        ],
        "results": {module: asdict(fate) for module, fate in usage.lifetimes.items()},
        "marks": _marks(usage),
        "reentries": [asdict(each) | {"site": str(each.site)} for each in usage.reentries],
        "stale_gradients": [asdict(each) | {"site": str(each.site)} for each in usage.gradients],
        "outside_the_boundary": sorted({str(origin) for origin in usage.outside}),
    }


def _marks(usage: Usage) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for mark in usage.marks:
        row = rows.setdefault(
            str(mark.site), {"site": str(mark.site), "marks": 0, "while_pending": 0, "graphs_waited": 0}
        )
        row["marks"] += 1
        row["while_pending"] += bool(mark.pending)
        row["graphs_waited"] += bool(mark.graphs_wait)
        row["pending"] = sorted({*row.get("pending", ()), *map(str, mark.pending)})
    return list(rows.values())


def _held(held: Held) -> dict[str, Any]:
    return {
        "module": held.origin.module,
        "step": held.origin.step,
        "site": str(held.origin.site),
        "shape": list(held.shape),
        "dtype": held.dtype,
        "holders": list(held.holders),
    }
