"""Defines the gate of a report, and publishes the report with what goes with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from service.compilation.diagnosis import Diagnosis
from service.compilation.ladder import Result
from service.compilation.program.target import Subject
from service.compilation.report.rows import counts, rung_row
from service.compilation.report.summary import causes, summary, unproved
from service.compilation.run.observation import Cost
from service.compilation.selftest import SelfTest
from service.jobs.atomic import atomic_draft, atomic_write
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import CompileSpec, Phase
from service.models.compiled import COMPILE_CACHE, cache_file

REPORT = "report.json"


def assemble(
    spec: CompileSpec,
    subject: Subject,
    results: list[Result],
    toolchain_s: float | None,
    *,
    diagnoses: Sequence[Diagnosis] = (),
    proved: SelfTest | None = None,
) -> dict[str, Any]:
    """Return the report as plain data."""
    proofs = proved.proofs if proved else ()
    why = unproved(proofs)
    opened = gate(results, spec.phases, subject.fingerprint, toolchain_s, micro_batches=spec.forwards, closed=why)
    return {
        "summary": [*summary(results, opened), *causes(diagnoses)],
        "gate": opened,
        "rungs": [rung_row(result) for result in results],
        "verdicts": counts(results),
        "diagnoses": [found.row() for found in diagnoses],
        "selftest": [asdict(proof) | {"holds": proof.holds} for proof in proofs],
        "selftest_kept_since": proved.kept_since if proved else "",
        "toolchain_s": toolchain_s,
        "tolerance": spec.permitted.model_dump(),
        "parallel": spec.parallel.model_dump(),
        **subject.about,
    }


def keep_caches(context: RunContext, spec: CompileSpec, results: list[Result]) -> None:
    """Write what this rank compiled for the allowed rungs, for jobs that name the gate."""
    folder = context.paths.artifacts / COMPILE_CACHE
    for phase in spec.phases:
        best = highest_safe(results, phase)
        cache = best.observation.cost.cache if best and best.observation and best.observation.cost else None
        if best and cache:
            path = folder / cache_file(phase, best.case.rung.name, context.rank)
            with atomic_draft(path) as draft:
                draft.write_bytes(cache)
            context.report.artifact(path)


def write(context: RunContext, report: dict[str, Any]) -> None:
    """Write the report in one piece."""
    context.paths.artifacts.mkdir(parents=True, exist_ok=True)
    atomic_write(context.paths.artifacts / REPORT, json.dumps(report, indent=1, allow_nan=False).encode())


def announce(context: RunContext, diagnoses: Sequence[Diagnosis]) -> None:
    """Tell of the report, and of what the diagnoses left beside it."""
    artifacts = context.paths.artifacts
    for found in diagnoses:
        if any((artifacts / found.trace).iterdir()):
            context.report.artifact(artifacts / found.trace)
        if found.reproduction.script:
            script = artifacts / found.reproduction.script
            context.report.artifact(script, "text/x-python")
            context.report.artifact(script.with_suffix(".safetensors"))
    context.report.artifact(artifacts / REPORT, "application/json")


def gate(
    results: Sequence[Result],
    phases: Sequence[Phase],
    fingerprint: Mapping[str, Any],
    toolchain_s: float | None,
    *,
    micro_batches: int = 1,
    closed: str = "",
) -> dict[str, Any]:
    """Return ``{train, inference, fingerprint, micro_batches, worth, closed}``.

    ``train`` and ``inference`` name the highest rung that passed with all below it (the mode to compile in), or are
    ``None``: not allowed, or not checked. ``worth`` says for each phase that was checked what the rung brings:
    ``{worth_it, ratio, noisy, break_even_steps}``. The gate holds for ``fingerprint`` and nothing else; CUDA graphs
    also only for one, or only for several, ``micro_batches`` a step. ``closed`` says why nothing is allowed whatever
    passed, as where the harness is not proved to see what it looks for.
    """
    best = {phase: highest_safe(results, phase) for phase in phases}
    allowed = {phase: found.case.rung.name if found and not closed else None for phase, found in best.items()}
    return {
        "train": allowed.get("train"),
        "inference": allowed.get("inference"),
        "fingerprint": dict(fingerprint),
        "micro_batches": micro_batches,
        "worth": {
            phase: _worth(found.observation.cost if found and found.observation else None, toolchain_s)
            for phase, found in best.items()
        },
        "closed": closed,
    }


def highest_safe(results: Sequence[Result], phase: Phase) -> Result | None:
    """Return the last rung of the unbroken row of passes from the foot of the ladder; one that does not apply breaks
    no row.
    """
    best = None
    for result in results:
        if result.case.phase == phase and result.verdict != "not_applicable":
            if result.verdict != "pass":
                break
            best = result
    return best


def _worth(cost: Cost | None, toolchain_s: float | None) -> dict[str, Any]:
    """Return what compiling is worth. ``worth_it``: compiled steps were faster in three quarters of the timed rounds.

    ``break_even_steps``: after so many steps a process with empty caches has won back its compile time, including
    the one-off start of the toolchain; ``None`` where steps are not faster.
    """
    if cost is None:
        return {"worth_it": False, "ratio": None, "noisy": None, "break_even_steps": None}
    race = cost.timed.race
    return {
        "worth_it": race.faster,
        "ratio": race.ratio,
        "noisy": race.noisy,
        "break_even_steps": break_even_steps(cost.cold_s + (toolchain_s or 0.0), race.eager_step_s - race.step_s),
    }


def break_even_steps(compile_s: float, saved_s: float) -> int | None:
    """Return the number of steps until ``saved_s`` a step has paid for ``compile_s``; ``None`` if nothing is saved."""
    return int(-(-compile_s // saved_s)) if saved_s > 0 else None
