"""The compile-check job: build the program, climb the ladder, publish the report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.compilation.gate import gate, highest_safe
from service.compilation.ladder import Result, climb, warm_toolchain
from service.compilation.observe import plan_for
from service.compilation.program import Program
from service.compilation.ranks import slowest
from service.compilation.report import counts, metrics, rung_row
from service.compilation.rungs import Rung, climb_to
from service.compilation.subject import Target, target_of
from service.compilation.summary import summary
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import CompileSpec
from service.models.compiled import COMPILE_CACHE, cache_file
from service.parallel import distributed


def run(spec: CompileSpec, context: RunContext) -> dict[str, Any] | None:
    """Climb on every rank; rank 0 publishes ``report.json`` and returns ``{gate, summary, verdicts}``.

    A rung that fails is a result, not an error: the job succeeds when it could judge. Raises ``ValueError`` for a
    spec that cannot be checked, and ``MeshError`` when the ranks do not form its mesh.
    """
    rungs = climb_to(spec.modes)
    device = distributed.start(context.device_type)
    target = target_of(spec, context, device)
    toolchain_s = warm_toolchain(target.program, rungs)
    results = list(_climb(spec, context, target.program, rungs))
    _keep_caches(context, spec, results)
    if context.rank:
        return None
    report = _report(spec, target, results, toolchain_s)
    _publish(context, report)
    return {name: report[name] for name in ("gate", "summary", "verdicts")}


def _climb(spec: CompileSpec, context: RunContext, program: Program, rungs: tuple[Rung, ...]) -> Iterator[Result]:
    """The results of all rungs, told to the reporter as they come."""
    plan = plan_for(program, spec.steps, spec.tolerance, slowest)
    total = len(rungs) * len(spec.phases)
    if context.rank == 0:
        context.report.progress(0, total, "rungs")
    started = time.time()
    for done, result in enumerate(climb(program, rungs, spec.phases, plan, context.should_stop), start=1):
        if context.rank == 0:
            _tell(context, result, done, total, started)
        started = time.time()
        yield result


def _tell(context: RunContext, result: Result, done: int, total: int, started: float) -> None:
    name = f"{result.case.phase}/{result.case.rung.name}"
    context.report.span(name, started, time.time(), {"verdict": result.verdict})
    context.report.metric(done, metrics(result))
    for finding in result.findings:
        context.report.log(f"{name}: {finding.verdict}: {finding.message}")
    context.report.progress(done, total, "rungs")


def _report(spec: CompileSpec, target: Target, results: list[Result], toolchain_s: float | None) -> dict[str, Any]:
    opened = gate(results, spec.phases, target.fingerprint, toolchain_s, spec.micro_batches)
    return {
        "summary": summary(results, opened),
        "gate": opened,
        "rungs": [rung_row(result) for result in results],
        "verdicts": counts(results),
        "toolchain_s": toolchain_s,
        "tolerance": spec.tolerance.model_dump(),
        "parallel": spec.parallel.model_dump(),
        **target.about,
    }


def _keep_caches(context: RunContext, spec: CompileSpec, results: list[Result]) -> None:
    """Write what this rank compiled for the allowed rungs, for jobs that name the gate."""
    folder = context.paths.artifacts / COMPILE_CACHE
    for phase in spec.phases:
        best = highest_safe(results, phase)
        cache = best.observation.cost.cache if best and best.observation and best.observation.cost else None
        if best and cache:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / cache_file(phase, best.case.rung.name, context.rank)
            path.write_bytes(cache)
            context.report.artifact(path)


def _publish(context: RunContext, report: dict[str, Any]) -> None:
    """Write the report in one piece and announce it."""
    folder: Path = context.paths.artifacts
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / ".report.json"
    draft.write_text(json.dumps(report, indent=1, allow_nan=False))
    draft.replace(folder / "report.json")
    context.report.artifact(folder / "report.json", "application/json")
