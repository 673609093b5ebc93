"""Writes the report: all results as plain data, in the form of the interface."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from service.compilation.evidence import CudaGraphs
from service.compilation.instruments.profile import Profile
from service.compilation.judgement import Result
from service.compilation.monitor.usage import Usage
from service.compilation.run.observation import Cost, Observation
from service.compilation.run.parity import Comparison
from service.parallel.boundary import HeldResult, Shapes


def rung_row(result: Result) -> dict[str, Any]:
    """Return one entry of ``rungs``. A field is ``None`` if it was not measured, never if it was found empty.

    Times are in seconds (``compile_s``) and milliseconds (``step_ms``), memory in GiB.
    """
    seen = result.observation
    return {
        "rung": result.case.rung.name,
        "phase": result.case.phase,
        "verdict": result.verdict,
        "findings": [asdict(finding) for finding in result.findings],
        **(_observation_row(seen) if seen else _empty_row()),
        "rehearsal": _rehearsal_row(result.rehearsal),
    }


def _parity_row(seen: Observation) -> dict[str, Any] | None:
    """Return the worst comparison of each kind, the failed ones, and their standards."""
    if not seen.compared:
        return None
    failed = [comparison for comparison in seen.comparisons if not comparison.passed]
    by_kind: dict[str, Comparison] = {}
    for comparison in seen.comparisons:
        if comparison.kind not in by_kind or comparison.excess > by_kind[comparison.kind].excess:
            by_kind[comparison.kind] = comparison
    return {
        "compared": seen.compared,
        "judged_by": "float64" if not seen.truth_note else "eager",
        "note": seen.truth_note,
        "worst": {kind: _comparison(comparison) for kind, comparison in by_kind.items()},
        "failed": [_comparison(comparison) for comparison in failed],
    }


def _observation_row(seen: Observation) -> dict[str, Any]:
    evidence = seen.evidence
    return {
        "parity": _parity_row(seen),
        "graphs": evidence.graphs,
        "backward_graphs": evidence.backward_graphs,
        "operations": evidence.operations,
        "fullgraph": evidence.fullgraph,
        "graph_breaks": [asdict(each) for each in evidence.graph_breaks],
        "recompiles": [asdict(each) for each in evidence.recompiles],
        "limit_hits": list(evidence.limit_hits),
        "parameters": _training_row(seen),
        "notes": list(seen.notes),
        "hooks_traced": sum(each.count for each in evidence.hooks),
        "hooks": [asdict(each) for each in evidence.hooks],
        "autograd_captures": evidence.autograd_captures,
        "cudagraph": _cudagraph(seen),
        **_usage_rows(seen.usage),
        **_cost(seen.cost),
    }


def _rehearsal_row(seen: Observation | None) -> dict[str, Any] | None:
    """Return the rehearsal of CUDA graphs without a CUDA device; ``None`` if none was needed."""
    return None if seen is None else {"parity": _parity_row(seen), "notes": list(seen.notes), **_usage_rows(seen.usage)}


def _empty_row() -> dict[str, Any]:
    fields = ("parity", "graphs", "backward_graphs", "operations", "fullgraph", "graph_breaks", "recompiles")
    more = ("limit_hits", "parameters", "notes", "hooks_traced", "hooks", "autograd_captures", "cudagraph")
    return dict.fromkeys((*fields, *more, *_usage_rows(Usage()))) | _cost(None)


def _training_row(seen: Observation) -> dict[str, Any] | None:
    training = seen.training
    if training is None:
        return None
    return {
        "trainable": training.trainable,
        "moved": len(training.moved),
        "moved_eager": len(training.moved_eager),
        "without_gradient": sorted(training.unreached),
        "unsharded": sorted(training.unsharded),
        "compiled_backwards": list(training.compiled_backwards),
    }


def _cost(cost: Cost | None) -> dict[str, Any]:
    race = cost.timed.race if cost else None
    return {
        "compile_s": {"cold": cost.cold_s, "warm": cost.warm_s} if cost else None,
        "cache_bytes": len(cost.cache) if cost and cost.cache else None,
        "step_ms": race.step_s * 1e3 if race else None,
        "eager_step_ms": race.eager_step_s * 1e3 if race else None,
        "ratio": race.ratio if race else None,
        "noisy": race.noisy if race else None,
        "profile": _profile(cost.timed.profile, cost.timed.compiled_share) if cost else None,
        "eager_profile": _profile(cost.timed.eager_profile, 0.0) if cost else None,
        "memory_gib": cost.peak.allocated_gib if cost and cost.peak else None,
        "eager_memory_gib": cost.eager_peak.allocated_gib if cost and cost.eager_peak else None,
        "reserved_gib": cost.peak.reserved_gib if cost and cost.peak else None,
        "eager_reserved_gib": cost.eager_peak.reserved_gib if cost and cost.eager_peak else None,
    }


def _profile(found: Profile | None, compiled_share: float | None) -> dict[str, Any] | None:
    """Return, for one step, the host's cost of launching it, and the share of its operators that ran compiled."""
    if found is None:
        return None
    return {
        "compiled_share": compiled_share,
        "enqueue_ms": found.enqueue_s * 1e3,
        "launches": found.launches,
        "graph_launches": found.graph_launches,
        "busy_ms": found.busy_s * 1e3 if found.busy_s is not None else None,
    }


def _cudagraph(seen: Observation) -> dict[str, Any] | None:
    """Return the fate of CUDA graphs; ``None`` on a rung that asks for none."""
    graphs = seen.evidence.cuda_graphs
    if graphs is None:
        return None
    profile = seen.cost.timed.profile if seen.cost else None
    return {
        "captures": graphs.captures,
        "launches_per_step": profile.graph_launches if profile else None,
        "skips": [asdict(each) for each in graphs.skips],
        "rerecords": [asdict(each) for each in graphs.rerecords],
        "by_shape": _by_shape(graphs, seen.usage),
        "late": list(graphs.late),
        "errors": [seen.error] if "overwritten" in seen.error else [],
    }


def _by_shape(graphs: CudaGraphs, usage: Usage) -> list[dict[str, Any]]:
    """Return how many CUDA graphs were recorded in iterations in which modules were called with these shapes."""
    found = Counter[str]()
    for iteration, count in enumerate(graphs.recorded):
        called = [
            f"{module} {each}" for module, shapes in usage.shapes.items() for each in _shapes_at(shapes, iteration)
        ]
        if count:
            found[", ".join(called) or "after the judged iterations"] += count
    return [{"shapes": name, "captures": count} for name, count in found.items()]


def _shapes_at(shapes: Sequence[frozenset[Shapes]], iteration: int) -> list[str]:
    called = sorted(shapes[iteration]) if iteration < len(shapes) else []
    return [" ".join(str(list(shape)) for shape in each) for each in called]


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {name: _finite_or_none(value) for name, value in asdict(comparison).items()}


def _finite_or_none(value: Any) -> Any:
    """Return ``None`` for an infinite number: JSON has none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _usage_rows(usage: Usage) -> dict[str, Any]:
    """Return ``invocations`` by module, phase, grad mode, thread, shape and dtype, ``lifetimes`` of results held over a
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
                "shape": call.shape,
                "dtype": call.dtype,
                "calls": count,
                "per_step": count / max(usage.iterations, 1),
            }
            for call, count in usage.invocations.items()
        ],
        "lifetimes": [_held_row(each) for each in usage.held],
        "stale_reads": [
            _held_row(each.held) | {"iteration": each.iteration, "read_at": str(each.site)} for each in usage.reads
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


def _held_row(held: HeldResult) -> dict[str, Any]:
    return {
        "module": held.origin.module,
        "step": held.origin.step,
        "site": str(held.origin.site),
        "shape": list(held.shape),
        "dtype": held.dtype,
        "holders": list(held.holders),
    }


def metrics(result: Result) -> Mapping[str, float]:
    """Return the numbers of a rung for the metrics stream, under ``phase/rung/``; nothing for a rung not reached."""
    seen = result.observation
    if seen is None:
        return {}
    values: dict[str, float] = {
        "passed": float(result.verdict == "pass"),
        "graphs": float(seen.evidence.graphs),
        "graph_breaks": float(sum(each.count for each in seen.evidence.graph_breaks)),
        "recompiles": float(len(seen.evidence.recompiles)),
    }
    if seen.cost:
        values |= {"compile_cold_s": seen.cost.cold_s}
        values |= {"compile_warm_s": seen.cost.warm_s} if seen.cost.warm_s is not None else {}
        race = seen.cost.timed.race
        values |= {"step_ms": race.step_s * 1e3, "eager_step_ms": race.eager_step_s * 1e3, "ratio": race.ratio}
    return {f"{result.case.phase}/{result.case.rung.name}/{name}": value for name, value in values.items()}


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Return how often each verdict was given."""
    return dict(Counter(result.verdict for result in results))
