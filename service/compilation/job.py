"""Runs the compile-check job: build the program, climb the ladder, look into what failed, prove the detectors,
publish.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from service.compilation.diagnosis import Diagnosis, diagnose
from service.compilation.ladder import Result, climb, warm_toolchain
from service.compilation.program import Program
from service.compilation.program.target import Target, target_of
from service.compilation.ranks.collective_attempt import GroupLostError
from service.compilation.ranks.group import are_together, gather, slowest
from service.compilation.report.publishing import announce, assemble, keep_caches, write
from service.compilation.report.rows import metrics
from service.compilation.run.run_rung import RunPlan, plan_run
from service.compilation.rungs import Rung, climb_to
from service.compilation.selftest import SelfTest, kept_or_run, self_test
from service.compilation.torch_internals.caches import clear_abandoned
from service.compilation.torch_internals.toolchain import Toolchain
from service.jobs.runtime import ENDING, Completion, RunContext
from service.jobs.spec.compile import CompileSpec
from service.parallel import distributed


def run(spec: CompileSpec, context: RunContext) -> dict[str, Any] | None:
    """Climb on every rank; rank 0 publishes ``report.json`` and returns ``{gate, summary, verdicts, completed}``.

    A rung that fails is a result, not an error: the job succeeds when it could judge. Raises ``ValueError`` for a
    spec that cannot be checked, ``MeshError`` when the ranks do not form its mesh, ``HostFaultError`` where the host
    kept it from judging: then there is no gate.
    """
    clear_abandoned()
    rungs = climb_to(spec.modes)
    device = distributed.start(context.device_type)
    toolchain = Toolchain(device)
    if any(rung.generates_code for rung in rungs):
        toolchain.begin()
    target = target_of(spec, context, device)
    if context.rank == 0:
        context.report.log(_begun(spec, rungs, target, device))
    context.report.phase("preparing")
    proved = _proved(context, toolchain.cache) if context.rank == 0 else None  # meanwhile headers are prepared
    toolchain_s = warm_toolchain(target.program, rungs, toolchain)
    plan = plan_run(target.program, spec.steps, spec.permitted, slowest)
    context.report.phase("first rung")
    results = list(_climb(spec, context, target.program, rungs, plan))
    keep_caches(context, spec, results)
    if context.rank == 0:  # what is known so far stays, should the compiler take the process down below
        write(context, assemble(spec, target, results, toolchain_s, proved=proved))
    to_explain = _to_explain(results) if are_together(context.world_size) else []
    diagnoses = list(_diagnose(context, target.program, to_explain, plan))
    if context.rank:
        return None
    context.report.phase(ENDING)
    report = assemble(spec, target, results, toolchain_s, diagnoses=diagnoses, proved=proved)
    write(context, report)
    announce(context, diagnoses)
    for sentence in report["summary"]:
        context.report.log(sentence)
    return {
        **{name: report[name] for name in ("gate", "summary", "verdicts")},
        "completed": _completed(context, results),
    }


def _begun(spec: CompileSpec, rungs: tuple[Rung, ...], target: Target, device: torch.device) -> str:
    """Return what is checked, in which layout, and up to which rung, as a line of the log."""
    about = target.about.get("model") or target.about["program"]
    name, phases = about.get("family") or about["name"], " and ".join(spec.phases)
    layout = f"{spec.parallel.arithmetic} rank{'s' * (spec.parallel.world_size > 1)} on {device.type}"
    return f"{name}: {phases}, {len(rungs)} rungs up to {rungs[-1].name}, {layout}"


def _completed(context: RunContext, results: list[Result]) -> Completion:
    """Return how many rungs were judged, or not reached for a reason of the program's own.

    A job that was asked to stop lacks at least one: its self-test and diagnoses may be missing too.
    """
    lacking = max(1, sum(result.verdict == "not_reached" for result in results)) if context.should_stop() else 0
    return Completion(done=len(results) - lacking, total=len(results), unit="rungs")


def _climb(
    spec: CompileSpec, context: RunContext, program: Program, rungs: tuple[Rung, ...], plan: RunPlan
) -> Iterator[Result]:
    """Yield the results of all rungs, told to the reporter as they come."""
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
    ended = time.time()
    context.report.span(name, started, ended, {"verdict": result.verdict})
    if result.observation is not None:
        context.report.log(f"{name}: {result.verdict.replace('_', ' ')} after {ended - started:.0f} s")
    context.report.metric(done, metrics(result))
    for finding in result.findings:
        context.report.log(f"{name}: {finding.verdict}: {finding.message}")
    context.report.progress(done, total, "rungs")


def _proved(context: RunContext, cache: Path | None) -> SelfTest:
    """Return the self-test, this job's or one that ``cache`` holds, unless the job was asked to stop."""
    if context.should_stop():
        return SelfTest(())
    context.report.log("self-test: whether each detector finds the fault that it is for")
    return kept_or_run(self_test, cache, context.device_type)


def _to_explain(results: list[Result]) -> list[Result]:
    """Return the rungs that stopped the climb."""
    stopped = (result for result in results if result.verdict not in {"pass", "not_applicable"})
    return [result for result in stopped if result.observation is not None]


def _diagnose(context: RunContext, program: Program, failed: list[Result], plan: RunPlan) -> Iterator[Diagnosis]:
    """Look into each of ``failed``, unless the job was asked to stop."""
    for result in failed:
        if any(gather(context.should_stop())):
            continue
        started = time.time()
        if context.rank == 0:
            context.report.log(f"{result.case.phase}/{result.case.rung.name}: looking for what fails in it")
        try:
            found = diagnose(program, result, plan, context.paths.artifacts)
        except GroupLostError as error:
            context.report.log(f"the diagnosis of {result.case.phase}/{result.case.rung.name} ended early: {error}")
            return
        if found is not None:
            if context.rank == 0:
                context.report.span(f"{found.phase}/{found.rung}/diagnosis", started, time.time(), found.row())
            yield found
