"""Judges what was seen of a rung, to one verdict of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from service.compilation.detectors import judge
from service.compilation.program import Program
from service.compilation.ranks.group import gather
from service.compilation.run.observation import Observation, RungCase
from service.compilation.verdicts import Finding, Verdict, worst

GRADIENT = "gradient"
RESULTS = frozenset({"loss", "output", GRADIENT})


@dataclass(frozen=True)
class Result:
    """One rung in one phase, judged."""

    case: RungCase
    verdict: Verdict
    """That of all ranks."""
    findings: tuple[Finding, ...]
    """Those of all ranks; why the rung was not reached, or does not apply; objections to CUDA graphs that do not."""
    observation: Observation | None = None
    """This rank's own; ``None`` for a rung that was not reached or does not apply."""
    rehearsal: Observation | None = None
    """What stood in for CUDA graphs that do not apply."""


def judge_rung(observation: Observation) -> Result:
    """Return the result of a rung, the same verdict and findings on every rank.

    It is not applicable if all its faults come from a limit of this rung alone, on every rank.
    """
    result = _judge_on_all(observation)
    limits = gather(observation.own_limit)
    if result.verdict != "fail_parity" or any(each.verdict != "fail_parity" for each in result.findings):
        return result
    wrong = gather(any(not each.passed for each in observation.comparisons))
    if not all(limit for limit, is_wrong in zip(limits, wrong, strict=True) if is_wrong):
        return result
    reason = next(limit for limit in limits if limit)
    return replace(result, verdict="not_applicable", findings=(Finding("not_applicable", reason), *result.findings))


def judge_rehearsal(observation: Observation, case: RungCase, program: Program) -> Result:
    """Judge a rehearsal of CUDA graphs without a CUDA device, which shows some of their faults."""
    message = f"CUDA graphs need a CUDA device; this program runs on {program.device.type}"
    rehearsed = _judge_on_all(observation)
    found = (replace(each, message=f"rehearsed without CUDA: {each.message}") for each in rehearsed.findings)
    findings = (Finding("not_applicable", message), *found)
    return Result(case, "not_applicable", findings, rehearsal=rehearsed.observation)


def _judge_on_all(observation: Observation) -> Result:
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
