"""Climbs the ladder: each rung only after the previous one passed, in every phase and on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter

import torch
from torch import Tensor

from service.compilation.detectors import judge
from service.compilation.host_fault import HostFaultError, describe, fault_of_program, raise_host_fault
from service.compilation.instruments.caches import empty_caches
from service.compilation.instruments.text import first_line
from service.compilation.instruments.toolchain import Toolchain
from service.compilation.program import Program
from service.compilation.ranks.collective_attempt import GroupLostError, Separable, collective_attempt
from service.compilation.ranks.group import any_rank, gather
from service.compilation.run.baseline import Baseline, make_baseline
from service.compilation.run.built_program import BuiltProgram, build, record_step
from service.compilation.run.observation import Observation, RungCase
from service.compilation.run.observe_rung import observe_rung, rehearse_rung
from service.compilation.run.oracles import noise_of, scale_of
from service.compilation.run.run_plan import RunPlan
from service.compilation.run.sampling import Key, local_part
from service.compilation.rungs import REHEARSAL, Rung
from service.compilation.verdicts import Finding, Verdict, worst
from service.jobs.spec.compile import Phase

GRADIENT = "gradient"
GOES_ON = frozenset({"pass", "not_applicable", "timeout"})
"""The verdicts after which the next rung is tried."""
RESULTS = frozenset({"loss", "output", GRADIENT})
_ERROR: Callable[[Observation], str] = attrgetter("error")
_TRIALS = 16
"""Parameters that are not told apart after so many runs count as affecting losses."""
_MOVED = 0.25
"""The distance by which a parameter is moved, relative to its size."""
_BEYOND = 4.0
"""The multiple of the difference between two eager runs that shows an influence."""


@dataclass(frozen=True)
class Result:
    """One rung in one phase, judged. ``observation`` is this rank's own; verdict and findings are all ranks'.

    ``observation`` is ``None`` for a rung that was not reached or does not apply; then ``findings`` says why.
    CUDA graphs that do not apply have a ``rehearsal``, and ``findings`` has its objections to them.
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

    Between rungs every rank asks ``should_stop``; the remaining rungs are then ``not_reached``. ``begins`` is called
    with each rung that is tried, once the uncompiled program has run.
    """
    lost = ""
    for number, phase in enumerate(phases, start=1):
        cases = [RungCase(rung, phase) for rung in rungs]
        later = len(rungs) * (len(phases) - number)
        lost = yield from _climb_phase(program, cases, plan, should_stop, lost, begins=begins, later=later)


def _climb_phase(
    program: Program,
    cases: Sequence[RungCase],
    plan: RunPlan,
    should_stop: Callable[[], bool],
    lost: str,
    *,
    begins: Callable[[RungCase], None],
    later: int,
) -> Generator[Result, None, str]:
    """Yield the results of a phase, before ``later`` rungs of others. ``lost`` says why the other ranks are gone, empty
    while they are there; return its new value.
    """
    look: Callable[[RungCase, RunPlan], Observation] | None = None
    blocked = lost
    for left, case in zip(range(later + len(cases), later, -1), cases, strict=True):
        if not blocked and any(gather(should_stop())):
            blocked = "the job was asked to stop"
        if blocked:
            yield Result(case, "not_reached", (Finding("not_reached", blocked),))
            continue
        try:
            look = look or _observer(program, case.phase, plan)
            begins(case)
            limited = replace(plan, limit_s=plan.share.seconds(left))
            if case.rung.cuda_graphs and program.device.type != "cuda":
                yield _not_applicable(look(RungCase(REHEARSAL, case.phase), limited), case, program)
                continue
            result = _limited(_judged(look(case, limited)))
        except GroupLostError as error:
            lost = f"the ranks lost each other at {case.rung.name} of {case.phase}"
            result = Result(case, "fail_error", error.findings)
        if result.verdict not in GOES_ON:
            blocked = lost or f"{case.rung.name} did not pass ({result.verdict})"
        yield result
    return lost


def _limited(result: Result) -> Result:
    """Return the result as not applicable if all its faults come from a limit of this rung alone, on every rank."""
    limits = gather(result.observation.own_limit if result.observation else "")
    if result.verdict != "fail_parity" or any(each.verdict != "fail_parity" for each in result.findings):
        return result
    found = gather(any(not each.passed for each in (result.observation.comparisons if result.observation else ())))
    if not all(limit for limit, wrong in zip(limits, found, strict=True) if wrong):
        return result
    reason = next(limit for limit in limits if limit)
    return replace(result, verdict="not_applicable", findings=(Finding("not_applicable", reason), *result.findings))


def _not_applicable(seen: Observation, case: RungCase, program: Program) -> Result:
    """Judge a rehearsal of CUDA graphs without a CUDA device, which shows some of their faults."""
    message = f"CUDA graphs need a CUDA device; this program runs on {program.device.type}"
    rehearsed = _judged(seen)
    found = (replace(each, message=f"rehearsed without CUDA: {each.message}") for each in rehearsed.findings)
    findings = (Finding("not_applicable", message), *found)
    return Result(case, "not_applicable", findings, rehearsal=rehearsed.observation)


def _observer(program: Program, phase: Phase, plan: RunPlan) -> Callable[[RungCase, RunPlan], Observation]:
    """Return the function that observes a rung of this phase; a model that does not even run uncompiled fails every
    one.

    If the baseline failed on any rank, none may enter the collectives of a run.
    """
    baseline, problem = collective_attempt(lambda: _uncompiled(program, phase, plan), itemgetter(1))
    problem = next((each for each in gather(problem) if each), "")
    if baseline is None or problem:
        return lambda case, _: Observation(case, error=problem)
    known = replace(baseline, unused=_unused(program, baseline))
    return lambda case, limited: _looked_at(program, case, known, limited)


def _without_influence(
    program: Program, baseline: Baseline, names: Collection[str], on_any: Callable[[bool], bool]
) -> frozenset[str]:
    """Return those of ``names``, parameters without a gradient in any iteration of training, that affect no
    loss and no gradient of another parameter.

    Each is moved, uncompiled, and nothing must change. Ranks do it together, with the same names; ``on_any`` returns
    whether a condition of this rank holds on any rank.
    """
    search = _Halving(build(program, "train"), baseline, on_any)
    return frozenset(names) - search.influential(sorted(names))


@dataclass
class _Halving:
    built: BuiltProgram
    baseline: Baseline
    on_any: Callable[[bool], bool]
    trials: int = field(default=0, init=False)

    def influential(self, names: Sequence[str]) -> frozenset[str]:
        """Return the parameters that affect a result, found by bisection."""
        found: set[str] = set()
        pending = [list(names)] if names else []
        while pending:
            group = pending.pop()
            if self.trials < _TRIALS and not self._moves(group):
                continue
            if len(group) == 1 or self.trials >= _TRIALS:
                found.update(group)
                continue
            pending += [group[: len(group) // 2], group[len(group) // 2 :]]
        return frozenset(found)

    def _moves(self, group: Sequence[str]) -> bool:
        """Return whether any result changes with these parameters moved, on any rank."""
        self.trials += 1
        built, eager = self.built.restarted(), self.baseline.eager
        moved = False
        for iteration in range(self.baseline.iterations):
            eager.starts[iteration % len(eager.starts)].restore(built)
            _move({name: built.trainable[name] for name in group if name in built.trainable})
            tensors = record_step(built, iteration).tensors
            moved = moved or any(self._differs(key, iteration, value) for key, value in tensors.items())
        return self.on_any(moved)

    def _differs(self, key: Key, iteration: int, value: Tensor) -> bool:
        oracle = self.baseline.oracles[iteration].get(key)
        if not key[0].startswith(("loss", "gradient")):
            return False
        return oracle is None or noise_of(oracle.eager, value).rms > _BEYOND * oracle.noise.rms


def _move(parameters: dict[str, Tensor]) -> None:
    """Add noise that depends only on the parameter's name."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            own = local_part(parameter)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(own.shape, generator=generator).to(own.device, own.dtype)
            own.add_(_MOVED * (scale_of(own) or 1.0) * noise)


def _unused(program: Program, baseline: Baseline) -> frozenset[str]:
    """Return the parameters without a gradient that affect no loss; none if that cannot be found out."""
    missing = frozenset[str]().union(*gather(baseline.eager.missing))
    if not missing:
        return missing

    def looked_for() -> tuple[frozenset[str], str]:
        try:
            with baseline.precision():
                return _without_influence(program, baseline, missing, any_rank), ""
        except Exception as error:
            return frozenset(), fault_of_program(error)

    found, problem = collective_attempt(looked_for, itemgetter(1))
    return frozenset() if any(gather(problem)) else found


def _looked_at(program: Program, case: RungCase, baseline: Baseline, plan: RunPlan) -> Observation:
    if case.rung.rehearses:
        return collective_attempt(lambda: rehearse_rung(program, case, baseline, plan), _ERROR)
    problem = _local_trial(program, case)
    if problem:
        return Observation(case, error=problem)
    seen = collective_attempt(lambda: observe_rung(program, case, baseline, plan), _ERROR)
    refused = next((each for each in gather(seen.error) if each), "")
    if not (refused and case.rung.generates_code and any_rank(baseline.draws_like_eager(case.rung))):
        return seen
    return collective_attempt(lambda: observe_rung(program, case, baseline, plan, refused), _ERROR)


def _local_trial(program: Program, case: RungCase) -> str:
    """Return the faults of any rank when each ran its own modules compiled; empty if there are none.

    Nothing is tried for a program that every rank runs whole: a fault of the compiler then shows on all of them.
    """
    if not isinstance(program, Separable):
        return ""
    own = collective_attempt(lambda: _problem(program, program, case), str)
    problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(gather(own)) if problem]
    return "; ".join(problems)


def _problem(program: Program, separable: Separable, case: RungCase) -> str:
    with empty_caches():
        try:
            built = build(program, case.phase, case.rung)
            separable.alone(built.parts, built.boundary, case.phase)
        except Exception as error:
            raise_host_fault(error)
            return f"{type(error).__name__}: {first_line(str(error))}"
    return ""


def _uncompiled(program: Program, phase: Phase, plan: RunPlan) -> tuple[Baseline | None, str]:
    """Return the uncompiled runs, or their error."""
    try:
        return make_baseline(program, phase, plan.iterations, any_rank, plan.tells), ""
    except Exception as error:
        return None, f"the uncompiled model does not run: {fault_of_program(error)}"


def _judged(observation: Observation) -> Result:
    if observation.given_up:
        return Result(observation.case, "timeout", (Finding("timeout", observation.given_up),))
    findings = _merge(gather((*judge(observation), *_nothing_compared(observation))))
    return Result(observation.case, worst(finding.verdict for finding in findings), findings, observation)


def _nothing_compared(observation: Observation) -> tuple[Finding, ...]:
    """Return a finding if the ranks' agreement rests on no results at all, or on none of the gradients. Some
    ranks of a pipeline have no results, so no rank can tell alone.
    """
    seen = gather((observation.error, observation.kinds, frozenset(each.kind for each in observation.comparisons)))
    finite, found = (frozenset[str]().union(*(each[index] for each in seen)) for index in (1, 2))
    if any(error for error, _, _ in seen) or (finite & RESULTS and GRADIENT not in found - finite):
        return ()
    nothing = GRADIENT if finite & RESULTS else "loss, output or gradient"
    return (Finding("vacuous", f"no {nothing} with a finite number in it was compared with eager's"),)


def _merge(per_rank: list[tuple[Finding, ...]]) -> tuple[Finding, ...]:
    """Return every finding once; those of only some ranks name these ranks."""
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

    ``None`` if no rung generates code. Raises :class:`HostFaultError` if it does not start: no program can be
    the cause.
    """
    if not any(rung.generates_code for rung in rungs):
        return None
    try:
        return (toolchain or Toolchain(device)).start()
    except Exception as error:
        raise_host_fault(error)
        raise HostFaultError(f"code generation does not start on this host: {describe(error)}") from error
