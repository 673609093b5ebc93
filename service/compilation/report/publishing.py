"""Publishes the report and what goes with it, among the job's artifacts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from service.compilation.diagnosis import Diagnosis
from service.compilation.ladder import Result
from service.compilation.program.target import Subject
from service.compilation.report.gate import gate, highest_safe
from service.compilation.report.rows import counts, rung_row
from service.compilation.report.summary import causes, summary, unproved
from service.compilation.selftest import SelfTest
from service.jobs.atomic import atomic_draft, atomic_write
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import CompileSpec
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
