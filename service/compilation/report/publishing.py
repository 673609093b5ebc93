"""Defines the gate of a report: the rung that each phase may use, and its gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.compilation.ladder import Result
from service.compilation.run.observation import Cost
from service.compilation.selftest import Proof
from service.jobs.spec.compile import Phase

REPORT = "report.json"


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
    ``None``: not allowed, or not checked. ``worth`` says for each checked phase what the rung gains:
    ``{worth_it, ratio, noisy, break_even_steps}``. The gate holds for ``fingerprint`` and nothing else; CUDA
    graphs also only for one, or only for several, ``micro_batches`` a step. ``closed`` says why nothing is
    allowed whatever passed, such as a harness whose detectors are not proved.
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


def unproved(proofs: Sequence[Proof]) -> str:
    """Say why findings, or their lack, prove nothing: the self-test failed, or has not run. Empty if it proved
    every detector.
    """
    if not proofs:
        return "the self-test has not run, so no detector is proved"
    failed = [
        f"detector {proof.detector} did not find {proof.fault}"
        if not proof.fired
        else f"there was a finding on a sound program ({proof.message})"
        for proof in proofs
        if not proof.holds
    ]
    more = f"; and {len(failed) - 1} more of {len(proofs)} proofs failed" if len(failed) > 1 else ""
    return f"the self-test failed: {failed[0]}{more}" if failed else ""


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
    """Return the gain of compiling. ``worth_it``: compiled steps were faster in three quarters of the timed rounds.

    ``break_even_steps``: after so many steps a process with empty caches has recovered its compile time,
    including the one-off start of the toolchain; ``None`` if steps are not faster.
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
