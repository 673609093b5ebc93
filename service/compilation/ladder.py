"""Climbing: each rung only after the one before it passed, in every phase and on every rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from service.compilation.detectors import judge
from service.compilation.host_fault import HostFaultError, raise_host_fault
from service.compilation.program import Program
from service.compilation.ranks.collective_attempt import GroupLostError, collective_attempt, local_trial
from service.compilation.ranks.group import any_rank, gather
from service.compilation.run.draws import draws_like_eager, precision
from service.compilation.run.influence import without_influence
from service.compilation.run.observation import Observation, RungCase
from service.compilation.run.parity import Comparison
from service.compilation.run.reference import Reference, run_reference
from service.compilation.run.run_rung import RunPlan, describe, rehearse_rung, run_rung
from service.compilation.rungs import REHEARSAL, Rung
from service.compilation.torch_internals.toolchain import Toolchain
from service.compilation.verdicts import Finding, Verdict, worst
from service.jobs.spec.compile import Phase

GRADIENT = "gradient"
RESULTS = frozenset({"loss", "output", GRADIENT})


@dataclass(frozen=True)
class Result:
    """One rung in one phase, judged. ``observation`` is this rank's own; verdict and findings are all ranks'.

    ``observation`` is ``None`` for a rung that was not reached or does not apply; then ``findings`` says why. Of CUDA
    graphs that do not apply there is a ``rehearsal``, and ``findings`` has what speaks against them all the same.
    """

    case: RungCase
    verdict: Verdict
    findings: tuple[Finding, ...]
    observation: Observation | None = None
    rehearsal: Observation | None = None


def climb(
    program: Program,
    rungs: Sequence[Rung],
    phases: Sequence[Phase],
    plan: RunPlan,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    begins: Callable[[RungCase], None] = lambda case: None,
) -> Iterator[Result]:
    """Yield the results, one for each rung and phase, as they come; phase by phase, from the foot of the ladder.

    ``should_stop`` is asked between rungs, for all ranks alike; what is left is then ``not_reached``. ``begins`` hears
    of each rung that is tried, once the uncompiled program has run.
    """
    lost = ""
    for phase in phases:
        lost = yield from _climb_phase(
            program, [RungCase(rung, phase) for rung in rungs], plan, should_stop, lost, begins=begins
        )


def _climb_phase(
    program: Program,
    cases: Sequence[RungCase],
    plan: RunPlan,
    should_stop: Callable[[], bool],
    lost: str,
    *,
    begins: Callable[[RungCase], None],
) -> Generator[Result, None, str]:
    """Yield the results of a phase. ``lost`` is why there are no other ranks any more, empty while they are there;
    its new
    value is returned.
    """
    look: Callable[[RungCase], Observation] | None = None
    blocked = lost
    for case in cases:
        if not blocked and any(gather(should_stop())):
            blocked = "the job was asked to stop"
        if blocked:
            yield Result(case, "not_reached", (Finding("not_reached", blocked),))
            continue
        try:
            look = look or _observer(program, case.phase, plan)
            begins(case)
            if case.rung.cuda_graphs and program.device.type != "cuda":
                yield _not_applicable(case, look, program)
                continue
            result = _limited(_judged(look(case)))
        except GroupLostError as error:
            lost = f"the ranks lost each other at {case.rung.name} of {case.phase}"
            result = Result(case, "fail_error", error.findings)
        if result.verdict not in {"pass", "not_applicable"}:
            blocked = lost or f"{case.rung.name} did not pass ({result.verdict})"
        yield result
    return lost


def _limited(result: Result) -> Result:
    """Return the result as not applicable if all that is wrong comes of a limit of this rung alone, on every rank."""
    limits = gather(result.observation.own_limit if result.observation else "")
    if result.verdict != "fail_parity" or any(each.verdict != "fail_parity" for each in result.findings):
        return result
    found = gather(any(not each.passed for each in _comparisons(result)))
    if not all(limit for limit, wrong in zip(limits, found, strict=True) if wrong):
        return result
    reason = next(limit for limit in limits if limit)
    return replace(result, verdict="not_applicable", findings=(Finding("not_applicable", reason), *result.findings))


def _comparisons(result: Result) -> tuple[Comparison, ...]:
    return result.observation.comparisons if result.observation else ()


def _not_applicable(case: RungCase, look: Callable[[RungCase], Observation], program: Program) -> Result:
    """Rehearse CUDA graphs without a CUDA device, for what can be found out without one."""
    message = f"CUDA graphs need a CUDA device; this program runs on {program.device.type}"
    rehearsed = _judged(look(RungCase(REHEARSAL, case.phase)))
    found = (replace(each, message=f"rehearsed without CUDA: {each.message}") for each in rehearsed.findings)
    findings = (Finding("not_applicable", message), *found)
    return Result(case, "not_applicable", findings, rehearsal=rehearsed.observation)


def _observer(program: Program, phase: Phase, plan: RunPlan) -> Callable[[RungCase], Observation]:
    """Return how to look at a rung of this phase; a model that does not even run uncompiled fails every one of them.

    If the reference failed on any rank, none may enter the collectives of a run.
    """
    reference, problem = collective_attempt(lambda: _reference(program, phase, plan), itemgetter(1))
    problem = next((each for each in gather(problem) if each), "")
    if reference is None or problem:
        return lambda case: Observation(case, error=problem)
    known = replace(reference, unused=_unused(program, reference))
    return lambda case: _looked_at(program, case, known, plan)


def _unused(program: Program, reference: Reference) -> frozenset[str]:
    """Return the parameters without a gradient of which no loss depends; none where that cannot be found out."""
    missing = frozenset[str]().union(*gather(reference.eager.missing))
    if not missing:
        return missing

    def looked_for() -> tuple[frozenset[str], str]:
        try:
            with precision(reference):
                return without_influence(program, reference, missing, any_rank), ""
        except Exception as error:
            raise_host_fault(error)
            return frozenset(), describe(error)

    found, problem = collective_attempt(looked_for, itemgetter(1))
    return frozenset() if any(gather(problem)) else found


def _looked_at(program: Program, case: RungCase, reference: Reference, plan: RunPlan) -> Observation:
    if case.rung.rehearses:
        return collective_attempt(lambda: rehearse_rung(program, case, reference, plan), _error)
    problem = local_trial(program, case)
    if problem:
        return Observation(case, error=problem)
    seen = collective_attempt(lambda: run_rung(program, case, reference, plan), _error)
    refused = next((each for each in gather(seen.error) if each), "")
    if not (refused and case.rung.generates_code and any_rank(draws_like_eager(case.rung, reference))):
        return seen
    return collective_attempt(lambda: run_rung(program, case, reference, plan, refused), _error)


def _error(seen: Observation) -> str:
    return seen.error


def _reference(program: Program, phase: Phase, plan: RunPlan) -> tuple[Reference | None, str]:
    """Return the uncompiled runs, or what they raised."""
    try:
        return run_reference(program, phase, plan.iterations, any_rank), ""
    except Exception as error:
        raise_host_fault(error)
        return None, f"the uncompiled model does not run: {describe(error)}"


def _judged(observation: Observation) -> Result:
    findings = _merge(gather((*judge(observation), *_nothing_compared(observation))))
    return Result(observation.case, worst(finding.verdict for finding in findings), findings, observation)


def _nothing_compared(observation: Observation) -> tuple[Finding, ...]:
    """Return a finding for agreement of all ranks on nothing at all, or on no gradient of those that there are. Of a
    pipeline some ranks have no results: so no rank can tell alone.
    """
    seen = gather((observation.error, observation.kinds, frozenset(each.kind for each in observation.comparisons)))
    finite, found = (frozenset[str]().union(*(each[index] for each in seen)) for index in (1, 2))
    if any(error for error, _, _ in seen) or (finite & RESULTS and GRADIENT not in found - finite):
        return ()
    nothing = GRADIENT if finite & RESULTS else "loss, output or gradient"
    return (Finding("vacuous", f"no {nothing} with a finite number in it was compared with eager's"),)


def _merge(per_rank: list[tuple[Finding, ...]]) -> tuple[Finding, ...]:
    """Return every finding once, those of a part of the ranks with the ranks that made them."""
    merged: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(per_rank):
        for finding in findings:
            merged.setdefault(finding, []).append(rank)
    return tuple(_attributed(finding, ranks, len(per_rank)) for finding, ranks in merged.items())


def _attributed(finding: Finding, ranks: list[int], world: int) -> Finding:
    if len(ranks) == world:
        return finding
    return Finding(finding.verdict, f"rank {', '.join(map(str, ranks))}: {finding.message}")


def warm_toolchain(device: torch.device, rungs: Sequence[Rung], toolchain: Toolchain | None = None) -> float | None:
    """Return the seconds of the one-off start-up of code generation, which ``toolchain`` may have begun.

    ``None`` if no rung generates code. Raises :class:`HostFaultError` where it does not start: no program has a part in
    that.
    """
    if not any(rung.generates_code for rung in rungs):
        return None
    try:
        return (toolchain or Toolchain(device)).start()
    except Exception as error:
        raise_host_fault(error)
        raise HostFaultError(f"code generation does not start on this host: {describe(error)}") from error
