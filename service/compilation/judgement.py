"""Judges what was seen of a rung, to one verdict of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.compilation.detectors import judge
from service.compilation.program import Program
from service.compilation.run.observation import Observation, RungCase
from service.compilation.verdicts import Finding, Verdict, worst
from service.parallel.distributed import gather

GRADIENT = "gradient"
RESULTS = frozenset({"loss", "output", GRADIENT})


@dataclass(frozen=True)
class Result:
    """One rung in one phase, judged."""

    case: RungCase
    verdict: Verdict
    """The verdict of all ranks."""
    findings: tuple[Finding, ...]
    """The findings of all ranks; for a rung that was not reached or does not apply, why not."""
    observation: Observation | None = None
    """This rank's own; ``None`` for a rung that was not reached or does not apply."""
    rehearsal: Observation | None = None
    """What stood in for CUDA graphs that do not apply."""


@dataclass(frozen=True)
class _Seen:
    """What one rank tells the others of its observation."""

    findings: tuple[Finding, ...]
    error: str
    finite: frozenset[str]
    """The kinds of results with a finite number that was compared."""
    compared: frozenset[str]
    """The kinds of results that were compared."""
    own_limit: str
    differs: bool
    """Whether any comparison failed."""

    @staticmethod
    def of(observation: Observation) -> _Seen:
        return _Seen(
            judge(observation),
            observation.error,
            observation.kinds,
            frozenset(each.kind for each in observation.comparisons),
            observation.own_limit,
            any(not each.passed for each in observation.comparisons),
        )


def judge_rung(observation: Observation) -> Result:
    """Return the result of a rung, with the same verdict and findings on every rank.

    It is not applicable if all its faults come from a limit of this rung alone, on every rank that has any.
    """
    if observation.given_up:  # on all ranks or none
        return Result(observation.case, "timeout", (Finding("timeout", observation.given_up),))
    ranks: list[_Seen] = gather(_Seen.of(observation))
    findings = _merge([(*each.findings, *_nothing_compared(ranks)) for each in ranks])
    result = Result(observation.case, worst(each.verdict for each in findings), findings, observation)
    limits = [each.own_limit for each in ranks if each.differs]
    if {each.verdict for each in findings} != {"fail_parity"} or not limits or not all(limits):
        return result
    return replace(result, verdict="not_applicable", findings=(Finding("not_applicable", limits[0]), *findings))


def judge_rehearsal(observation: Observation, case: RungCase, program: Program) -> Result:
    """Judge a rehearsal of CUDA graphs without a CUDA device, which shows some of their faults."""
    message = f"CUDA graphs need a CUDA device; this program runs on {program.device.type}"
    rehearsed = judge_rung(observation)
    found = (replace(each, message=f"rehearsed without CUDA: {each.message}") for each in rehearsed.findings)
    findings = (Finding("not_applicable", message), *found)
    return Result(case, "not_applicable", findings, rehearsal=rehearsed.observation)


def _nothing_compared(ranks: Sequence[_Seen]) -> tuple[Finding, ...]:
    """Return a finding if the ranks' agreement rests on no results at all, or on none of the gradients. Some
    ranks of a pipeline have no results, so no rank can tell alone.
    """
    finite = frozenset[str]().union(*(each.finite for each in ranks))
    compared = frozenset[str]().union(*(each.compared for each in ranks))
    if any(each.error for each in ranks) or (finite & RESULTS and GRADIENT not in compared - finite):
        return ()
    nothing = GRADIENT if finite & RESULTS else "loss, output or gradient"
    return (Finding("vacuous", f"no {nothing} with a finite number in it was compared with eager's"),)


def _merge(per_rank: list[tuple[Finding, ...]]) -> tuple[Finding, ...]:
    """Return every finding once; those of only some ranks name these ranks."""
    merged: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(per_rank):
        for finding in findings:
            merged.setdefault(finding, []).append(rank)
    return tuple(_attribute_to_ranks(finding, ranks, len(per_rank)) for finding, ranks in merged.items())


def _attribute_to_ranks(finding: Finding, ranks: list[int], world: int) -> Finding:
    if len(ranks) == world:
        return finding
    return Finding(finding.verdict, f"rank {', '.join(map(str, ranks))}: {finding.message}")
