"""Runs the compile-check job: builds the program, climbs the ladder, investigates failures, proves the
detectors, publishes.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from service.compilation.activity import Activity
from service.compilation.diagnosis import Diagnosis, diagnose
from service.compilation.forks import RAISED, ForkedProcess, Forks, Seat
from service.compilation.host_fault import HostFaultError
from service.compilation.ladder import Result, climb, warm_toolchain
from service.compilation.lane_process import Climbed, Lane, Prepared
from service.compilation.lanes import climb_apart, in_lanes
from service.compilation.program import Program
from service.compilation.program.target import Subject, target_of
from service.compilation.ranks.collective_attempt import GroupLostError
from service.compilation.ranks.group import gather, slowest
from service.compilation.report.publishing import REPORT, gate, highest_safe, unproved
from service.compilation.report.rows import counts, metrics, rung_row
from service.compilation.report.summary import causes, summary
from service.compilation.run.observation import RungCase
from service.compilation.run.run_rung import RunPlan, plan_run
from service.compilation.rungs import Rung, climb_to
from service.compilation.selftest import SelfTest, kept_or_run, self_test
from service.compilation.time_share import TimeShare
from service.compilation.torch_internals.caches import clear_abandoned
from service.compilation.torch_internals.toolchain import Toolchain, own_cache
from service.jobs.files import atomic_draft, atomic_write
from service.jobs.runtime import ENDING, Completion, RunContext, Stopwatch
from service.jobs.spec.compile import CompileSpec
from service.models.compiled import COMPILE_CACHE, cache_file
from service.parallel import distributed

_SELF_TEST = "self-test: each detector must find its fault"


def run(spec: CompileSpec, context: RunContext, forks: Forks | None = None) -> dict[str, Any] | None:
    """Climb on every rank; rank 0 publishes ``report.json`` and returns ``{gate, summary, verdicts, completed}``.

    A rung that fails is a result, not an error: the job succeeds when it could judge. Raises ``ValueError`` for
    a spec that cannot be checked, ``MeshError`` if the ranks do not form its mesh, ``HostFaultError`` if the
    host kept it from judging: then there is no gate. The ``forks`` of this process climb, if there are any;
    they serve by :func:`serve`.
    """
    clear_abandoned()
    rungs, share = climb_to(spec.modes), TimeShare.of(spec.timeout_s)
    climbed = _climbed_apart(spec, context, rungs, share, forks) if forks else None
    found = climbed or _climbed_here(spec, context, rungs, share)
    _keep_caches(context, spec, found.results)
    if context.rank == 0:  # these results stay if the compiler crashes the process below
        _write(context, found.report(spec))
    are_together = context.world_size == 1 or dist.is_initialized()  # unless the group has been left
    diagnoses = _diagnoses(spec, context, found) if are_together else []
    if context.rank:
        return None
    context.report.phase(ENDING)
    report = found.report(spec, diagnoses)
    _write(context, report)
    _announce(context, diagnoses)
    for sentence in report["summary"]:
        context.report.log(sentence)
    return {
        **{name: report[name] for name in ("gate", "summary", "verdicts")},
        "completed": _completed(context, found.results),
    }


def _announce(context: RunContext, diagnoses: Sequence[Diagnosis]) -> None:
    """Publish the report, and the files of the diagnoses beside it."""
    artifacts = context.paths.artifacts
    for found in diagnoses:
        if any((artifacts / found.trace).iterdir()):
            context.report.artifact(artifacts / found.trace)
        if found.reproduction.script:
            script = artifacts / found.reproduction.script
            context.report.artifact(script, "text/x-python")
            context.report.artifact(script.with_suffix(".safetensors"))
    context.report.artifact(artifacts / REPORT, "application/json")


def _write(context: RunContext, report: dict[str, Any]) -> None:
    """Write the report atomically."""
    context.paths.artifacts.mkdir(parents=True, exist_ok=True)
    atomic_write(context.paths.artifacts / REPORT, json.dumps(report, indent=1, allow_nan=False).encode())


def _keep_caches(context: RunContext, spec: CompileSpec, results: list[Result]) -> None:
    """Write this rank's compiled code of the allowed rungs, for jobs that name the gate."""
    folder = context.paths.artifacts / COMPILE_CACHE
    for phase in spec.phases:
        best = highest_safe(results, phase)
        cache = best.observation.cost.cache if best and best.observation and best.observation.cost else None
        if best and cache:
            path = folder / cache_file(phase, best.case.rung.name, context.rank)
            with atomic_draft(path) as draft:
                draft.write_bytes(cache)
            context.report.artifact(path)


def _assemble(
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


@dataclass(frozen=True)
class _Found:
    """The results of a climb; ``program`` and ``plan`` are ``None`` if other processes had them."""

    subject: Subject
    toolchain_s: float | None
    results: list[Result]
    proved: SelfTest | None
    program: Program | None = None
    plan: RunPlan | None = None

    def report(self, spec: CompileSpec, diagnoses: Sequence[Diagnosis] = ()) -> dict[str, Any]:
        return _assemble(spec, self.subject, self.results, self.toolchain_s, diagnoses=diagnoses, proved=self.proved)


def _climbed_here(spec: CompileSpec, context: RunContext, rungs: tuple[Rung, ...], share: TimeShare) -> _Found:
    """Climb in this process: for ranks that climb together, and on few cores without a GPU."""
    device = distributed.start(context.device_type)
    toolchain = Toolchain(device)
    if any(rung.generates_code for rung in rungs):
        toolchain.begin()
    target = target_of(spec, context, device)
    if context.rank == 0:
        context.report.log(_begun(spec, context, rungs, target.subject))
    context.report.phase("preparing")
    proved = _proved(context, toolchain.cache) if context.rank == 0 else None  # headers are prepared meanwhile
    toolchain_s = warm_toolchain(device, rungs, toolchain)
    activity = Activity(context.report, len(rungs) * len(spec.phases))
    activity.begin(0, [RungCase(rung, phase) for phase in spec.phases for rung in rungs])
    tells = partial(activity.hear, 0) if context.rank == 0 else _say_nothing
    plan = replace(plan_run(target.program, spec.steps, spec.permitted, slowest), share=share, tells=tells)
    context.report.phase("first rung")
    climbed = _timed(climb(target.program, rungs, spec.phases, plan, context.should_stop))
    results = list(_told(context, climbed, activity))
    return _Found(target.subject, toolchain_s, results, proved, target.program, plan)


def _say_nothing(name: str) -> None:
    """Take the name of a run, which the first rank reports."""


def serve(spec: CompileSpec, context: RunContext, seat: Seat, task: Lane | None) -> None:
    """Do a task in a process of its own: climb a lane or, without one, prove the detectors."""
    if task is not None:
        task.climb(lambda: _prepared(spec, context, climb_to(spec.modes)), seat)
    else:
        seat.tell("proved", kept_or_run(self_test, own_cache(), context.device_type))


def _climbed_apart(
    spec: CompileSpec, context: RunContext, rungs: tuple[Rung, ...], share: TimeShare, forks: Forks
) -> _Found:
    """Climb in processes of their own, while the detectors are proved in another."""
    context.report.phase("preparing")
    context.report.log(_SELF_TEST)
    proving = forks.take(None)
    prepared: list[tuple[Subject, float | None]] = []

    def hear(about: tuple[Subject, float | None]) -> None:
        context.report.log(_begun(spec, context, rungs, about[0]))
        context.report.phase("first rung")
        prepared.append(about)

    lanes = in_lanes(rungs, spec.phases, len(os.sched_getaffinity(0)))
    activity = Activity(context.report, len(rungs) * len(spec.phases))
    climbed = climb_apart(forks, lanes, context.should_stop, hear, watcher=activity, share=share)
    results = list(_told(context, climbed, activity))
    if not prepared:
        raise HostFaultError("no process of the check came to its first rung")
    subject, toolchain_s = prepared[0]
    proved = SelfTest(()) if context.should_stop() else _proved_by(proving)
    proving.end()
    return _Found(subject, toolchain_s, results, proved)


def _proved_by(proving: ForkedProcess) -> SelfTest:
    try:
        word, content = proving.told.recv()
    except (EOFError, OSError) as error:
        raise HostFaultError("the process that proves the detectors ended") from error
    if word == RAISED:
        raise content
    return cast(SelfTest, content)


def _prepared(spec: CompileSpec, context: RunContext, rungs: tuple[Rung, ...]) -> Prepared:
    """Return the program as a process of its own climbs it."""
    device = distributed.start_alone(context.device_type)
    toolchain_s = warm_toolchain(device, rungs, Toolchain(device))
    gc.freeze()  # imported objects hold no results, and searching them takes long
    target = target_of(spec, context, device)
    plan = plan_run(target.program, spec.steps, spec.permitted, slowest)
    return Prepared(target.program, plan, (target.subject, toolchain_s))


def _begun(spec: CompileSpec, context: RunContext, rungs: tuple[Rung, ...], subject: Subject) -> str:
    """Return a line of the log with the checked program, its layout, and the highest rung."""
    about = subject.about.get("model") or subject.about["program"]
    name, phases = about.get("family") or about["name"], " and ".join(spec.phases)
    layout = f"{spec.parallel.arithmetic} rank{'s' * (spec.parallel.world_size > 1)} on {context.device_type}"
    return f"{name}: {phases}, {len(rungs)} rungs up to {rungs[-1].name}, {layout}"


def _completed(context: RunContext, results: list[Result]) -> Completion:
    """Return how many rungs were judged, or not reached because of the program.

    A job that was asked to stop lacks at least one: its self-test and diagnoses may be missing too.
    """
    lacking = max(1, sum(result.verdict == "not_reached" for result in results)) if context.should_stop() else 0
    return Completion(done=len(results) - lacking, total=len(results), unit="rungs")


def _timed(results: Iterator[Result]) -> Iterator[Climbed]:
    """Yield the results, each with the time that it took."""
    watch = Stopwatch()
    for result in results:
        yield Climbed(result, (watch.began, watch.now))
        watch = Stopwatch()


def _told(context: RunContext, climbed: Iterator[Climbed], activity: Activity) -> Iterator[Result]:
    """Yield the results of all rungs, and tell each to the reporter as it comes."""
    if context.rank == 0:
        activity.publish(0)
    for done, each in enumerate(climbed, start=1):
        if context.rank == 0:
            _tell(context, each, done)
            activity.publish(done)
        yield each.result


def _tell(context: RunContext, climbed: Climbed, done: int) -> None:
    result = climbed.result
    name = f"{result.case.phase}/{result.case.rung.name}"
    started, ended = climbed.ran or (time.time(),) * 2
    context.report.span(name, started, ended, {"verdict": result.verdict})
    if result.observation is not None:
        context.report.log(f"{name}: {result.verdict.replace('_', ' ')} after {ended - started:.0f} s")
    context.report.metric(done, metrics(result))
    for finding in result.findings:
        context.report.log(f"{name}: {finding.verdict}: {finding.message}")
    for line in climbed.stacks.splitlines():
        context.report.log(line)


def _proved(context: RunContext, cache: Path | None) -> SelfTest:
    """Return the self-test, this job's or one from ``cache``, unless the job was asked to stop."""
    if context.should_stop():
        return SelfTest(())
    context.report.log(_SELF_TEST)
    return kept_or_run(self_test, cache, context.device_type)


def _diagnoses(spec: CompileSpec, context: RunContext, found: _Found) -> list[Diagnosis]:
    """Return the diagnoses of the rungs that stopped the climb, except of crashes: they would happen here, too."""
    stopped = [each for each in found.results if each.verdict not in {"pass", "not_applicable"}]
    to_explain = [each for each in stopped if each.observation is not None and not each.observation.crashed]
    if not to_explain:
        return []
    program, plan = found.program, found.plan
    if program is None or plan is None:
        prepared = _prepared(spec, context, climb_to(spec.modes))
        program, plan = prepared.program, prepared.plan
    return list(_diagnose(context, program, to_explain, plan))


def _diagnose(context: RunContext, program: Program, failed: list[Result], plan: RunPlan) -> Iterator[Diagnosis]:
    """Diagnose each of ``failed``, unless the job was asked to stop."""
    for result in failed:
        if any(gather(context.should_stop())):
            continue
        watch = Stopwatch()
        if context.rank == 0:
            context.report.log(f"{result.case.phase}/{result.case.rung.name}: looking for the failing module")
        try:
            found = diagnose(program, result, plan, context.paths.artifacts)
        except GroupLostError as error:
            context.report.log(f"the diagnosis of {result.case.phase}/{result.case.rung.name} ended early: {error}")
            return
        if found is not None:
            if context.rank == 0:
                context.report.span(f"{found.phase}/{found.rung}/diagnosis", watch.began, watch.now, found.row())
            yield found
