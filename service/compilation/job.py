"""Runs the compile-check job: builds the program, climbs the ladder, investigates failures, proves the
detectors, publishes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from service.compilation.activity import Activity
from service.compilation.climber_process import Climbed, ClimbTask
from service.compilation.climbers import climb_apart
from service.compilation.diagnosis import Diagnosis, diagnose_all
from service.compilation.forks import RAISED, ForkedProcess, Forks, Seat
from service.compilation.host_fault import HostFaultError
from service.compilation.instruments.caches import clear_abandoned
from service.compilation.instruments.toolchain import Toolchain
from service.compilation.judgement import Result
from service.compilation.ladder import climb
from service.compilation.plans import plans
from service.compilation.prepare import Prepared, prepare_alone, start_toolchain
from service.compilation.program.target import Subject, target_of
from service.compilation.ranks.group import slowest
from service.compilation.report.publishing import Climb, publish_report, write_report
from service.compilation.run.observation import RungCase
from service.compilation.run.run_plan import plan_run
from service.compilation.run_seconds import RunSeconds
from service.compilation.rungs import Rung, climb_to
from service.compilation.selftest import SelfTest, kept_or_run, self_test
from service.compilation.time_share import TimeShare
from service.jobs.runtime import ENDING, Completion, NullReporter, RunContext, Stopwatch
from service.jobs.spec.compile import CompileSpec
from service.models.host_compiler import own_cache
from service.models.reference import check_whole
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
    prepared: Prepared | None = None
    if forks:
        found = _climb_apart(spec, context, rungs, share, forks)
    else:
        found, prepared = _climb_here(spec, context, rungs, share)
    found.keep_caches(context, spec.phases)
    if context.rank == 0:  # these results stay if the compiler crashes the process below
        write_report(context, found.report(spec))
    are_together = context.world_size == 1 or dist.is_initialized()  # unless the group has been left
    diagnoses = _diagnose(spec, context, found.results, prepared) if are_together else []
    if context.rank:
        return None
    context.report.phase(ENDING)
    report = found.report(spec, diagnoses)
    publish_report(context, report, diagnoses)
    return {
        **{name: report[name] for name in ("gate", "summary", "verdicts")},
        "completed": _count_completed(context, found.results),
    }


def serve(spec: CompileSpec, context: RunContext, seat: Seat, task: ClimbTask | None) -> None:
    """Do a task in a process of its own: climb or, without rungs to climb, prove the detectors."""
    if task is not None:
        task.climb(lambda: prepare_alone(spec, context, begins=task.generates_code), seat)
    else:
        seat.tell("proved", kept_or_run(self_test, own_cache(), context.device_type))


def _climb_here(
    spec: CompileSpec, context: RunContext, rungs: tuple[Rung, ...], share: TimeShare
) -> tuple[Climb, Prepared]:
    """Climb in this process: for ranks that climb together, and on few cores without a GPU."""
    report = context.report if context.rank == 0 else NullReporter()
    device = distributed.start(context.device_type)
    toolchain = Toolchain(device)
    if any(rung.generates_code for rung in rungs):
        toolchain.begin()
    target = target_of(spec, context, device)
    report.log(_describe_beginning(spec, context, rungs, target.subject))
    context.report.phase("preparing")
    proved = _prove(context, toolchain.cache) if context.rank == 0 else None  # headers are prepared meanwhile
    toolchain_s = start_toolchain(toolchain, rungs)
    activity = Activity(report, len(rungs) * len(spec.phases))
    activity.begin(0, [RungCase(rung, phase) for phase in spec.phases for rung in rungs])
    plan = plan_run(target.program, spec.steps, spec.permitted, slowest)
    runs = RunSeconds(partial(activity.hear, 0))
    plan = replace(plan, share=share, tells=runs.begin, fullgraph=spec.fullgraph)
    context.report.phase("first rung")
    climbed = _time_results(climb(target.program, rungs, spec.phases, plan, context.should_stop), runs)
    results = list(activity.report_results(climbed))
    found = Climb(target.subject, toolchain_s, results, proved)
    return found, Prepared(target.program, plan, target.subject)


def _climb_apart(
    spec: CompileSpec, context: RunContext, rungs: tuple[Rung, ...], share: TimeShare, forks: Forks
) -> Climb:
    """Climb in processes of their own, while the detectors are proved in another, and a thread of this one finds out
    whether the weights are whole.
    """
    context.report.phase("preparing")
    context.report.log(_SELF_TEST)
    proving = forks.take(None)
    prepared: list[tuple[Subject, float | None]] = []

    def hear(about: tuple[Subject, float | None]) -> None:
        if not prepared:
            wait_for_weights()
            context.report.log(_describe_beginning(spec, context, rungs, about[0]))
            context.report.phase("first rung")
        prepared.append(about)

    planned = plans(rungs, spec.phases, len(os.sched_getaffinity(0)))
    activity = Activity(context.report, len(rungs) * len(spec.phases))
    climbed = climb_apart(forks, planned, context.should_stop, hear, watcher=activity, share=share)
    with _weights_checked(spec, context) as wait_for_weights:
        results = list(activity.report_results(climbed))
    if not prepared:
        raise HostFaultError("no process of the check came to its first rung")
    subject = prepared[0][0]
    toolchain_s = next((seconds for _, seconds in prepared if seconds is not None), None)
    proved = SelfTest(()) if context.should_stop() else _receive_proofs(proving)
    proving.end()
    return Climb(subject, toolchain_s, results, proved)


@contextmanager
def _weights_checked(spec: CompileSpec, context: RunContext) -> Iterator[Callable[[], None]]:
    """Check in a thread whether the model's weights are whole, and yield what waits for that and raises
    :class:`WeightsError` if they are not; so does any error within.
    """
    with ThreadPoolExecutor(1, "weights") as pool:
        whole = pool.submit(lambda: None if spec.model is None else check_whole(spec.model, context.data))
        try:
            yield whole.result
        except Exception:
            whole.result()
            raise


def _receive_proofs(proving: ForkedProcess) -> SelfTest:
    try:
        word, content = proving.told.recv()
    except (EOFError, OSError) as error:
        raise HostFaultError("the process that proves the detectors ended") from error
    if word == RAISED:
        raise content
    return cast(SelfTest, content)


def _prove(context: RunContext, cache: Path | None) -> SelfTest:
    """Return the self-test, this job's or one from ``cache``, unless the job was asked to stop."""
    if context.should_stop():
        return SelfTest(())
    context.report.log(_SELF_TEST)
    return kept_or_run(self_test, cache, context.device_type)


def _describe_beginning(spec: CompileSpec, context: RunContext, rungs: tuple[Rung, ...], subject: Subject) -> str:
    """Return a line of the log with the checked program, its layout, and the highest rung."""
    about = subject.about.get("model") or subject.about["program"]
    name, phases = about.get("family") or about["name"], " and ".join(spec.phases)
    layout = f"{spec.parallel.arithmetic} rank{'s' * (spec.parallel.world_size > 1)} on {context.device_type}"
    return f"{name}: {phases}, {len(rungs)} rungs up to {rungs[-1].name}, {layout}"


def _time_results(results: Iterator[Result], runs: RunSeconds) -> Iterator[Climbed]:
    """Yield the results, each with the time that it took."""
    watch = Stopwatch()
    for result in results:
        yield Climbed(result, (watch.began, watch.now), runs=runs.take())
        watch = Stopwatch()


def _diagnose(
    spec: CompileSpec, context: RunContext, results: Sequence[Result], prepared: Prepared | None
) -> list[Diagnosis]:
    """Return the diagnoses of the rungs that stopped the climb, except of crashes: they would happen here, too."""
    stopped = [each for each in results if each.verdict not in {"pass", "not_applicable"}]
    to_explain = [each for each in stopped if each.observation is not None and not each.observation.crashed]
    if not to_explain:
        return []
    if prepared is None:
        prepared = prepare_alone(spec, context)
        prepared.start([each.case.rung for each in to_explain])
    return list(diagnose_all(context, prepared.program, to_explain, prepared.plan))


def _count_completed(context: RunContext, results: list[Result]) -> Completion:
    """Return how many rungs were judged, or not reached because of the program.

    A job that was asked to stop lacks at least one: its self-test and diagnoses may be missing too.
    """
    lacking = max(1, sum(result.verdict == "not_reached" for result in results)) if context.should_stop() else 0
    return Completion(done=len(results) - lacking, total=len(results), unit="rungs")
