"""Publishes a check: the gate, with the rung that each phase may use and its gain, inside the whole report, and the
compiled code of those rungs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from service.compilation.diagnosis import Diagnosis
from service.compilation.judgement import Result
from service.compilation.program.target import Subject
from service.compilation.report.rows import counts, rung_row
from service.compilation.report.summary import causes, summary
from service.compilation.run.observation import Cost
from service.compilation.selftest import Proof, SelfTest
from service.jobs.files import atomic_draft, atomic_write
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import CompileSpec, Phase
from service.models.compiled import COMPILE_CACHE, cache_file

REPORT = "report.json"


@dataclass(frozen=True)
class Climb:
    """A finished climb: the program, the results of all rungs, and the proofs that they rest on."""

    subject: Subject
    toolchain_s: float | None
    results: list[Result]
    proved: SelfTest | None
    """``None`` on ranks that do not report."""

    def report(self, spec: CompileSpec, diagnoses: Sequence[Diagnosis] = ()) -> dict[str, Any]:
        """Return the report as plain data."""
        proofs = self.proved.proofs if self.proved else ()
        opened = gate(
            self.results,
            spec.phases,
            self.subject.fingerprint,
            self.toolchain_s,
            micro_batches=spec.forwards,
            shapes=self.subject.shapes,
            closed=why_unproved(proofs),
        )
        return {
            "summary": [*summary(self.results, opened), *causes(diagnoses)],
            "gate": opened,
            "rungs": [rung_row(result) for result in self.results],
            "verdicts": counts(self.results),
            "diagnoses": [found.row() for found in diagnoses],
            "selftest": [asdict(proof) | {"holds": proof.holds} for proof in proofs],
            "selftest_kept_since": self.proved.kept_since if self.proved else "",
            "toolchain_s": self.toolchain_s,
            "tolerance": spec.permitted.model_dump(),
            "parallel": spec.parallel.model_dump(),
            **self.subject.about,
        }

    def keep_caches(self, context: RunContext, phases: Sequence[Phase]) -> None:
        """Publish this rank's compiled code of the allowed rungs, for jobs that name the gate."""
        for phase in phases:
            best = highest_safe(self.results, phase)
            cache = best.observation.cost.cache if best and best.observation and best.observation.cost else None
            if best and cache:
                path = context.paths.artifacts / COMPILE_CACHE / cache_file(phase, best.case.rung.name, context.rank)
                with atomic_draft(path) as draft:
                    draft.write_bytes(cache)
                context.report.artifact(path)


def write_report(context: RunContext, report: Mapping[str, Any]) -> None:
    """Write the report atomically, in place of an earlier one."""
    context.paths.artifacts.mkdir(parents=True, exist_ok=True)
    atomic_write(context.paths.artifacts / REPORT, json.dumps(report, indent=1, allow_nan=False).encode())


def publish_report(context: RunContext, report: Mapping[str, Any], diagnoses: Sequence[Diagnosis]) -> None:
    """Write the last report; publish it, and the files of the diagnoses beside it."""
    write_report(context, report)
    artifacts = context.paths.artifacts
    for found in diagnoses:
        if any((artifacts / found.trace).iterdir()):
            context.report.artifact(artifacts / found.trace)
        if found.reproduction.script:
            script = artifacts / found.reproduction.script
            context.report.artifact(script, "text/x-python")
            context.report.artifact(script.with_suffix(".safetensors"))
    context.report.artifact(artifacts / REPORT, "application/json")
    for sentence in report["summary"]:
        context.report.log(sentence)


def gate(
    results: Sequence[Result],
    phases: Sequence[Phase],
    fingerprint: Mapping[str, Any],
    toolchain_s: float | None,
    *,
    micro_batches: int = 1,
    shapes: Sequence[Sequence[int]] = (),
    closed: str = "",
) -> dict[str, Any]:
    """Return ``{train, inference, fingerprint, micro_batches, shapes, worth, closed}``.

    ``train`` and ``inference`` name the highest rung that passed with all below it (the mode to compile in), or are
    ``None``: not allowed, or not checked. ``worth`` says for each checked phase what the rung gains:
    ``{worth_it, ratio, noisy, break_even_steps}``. The gate holds for ``fingerprint`` and nothing else; CUDA
    graphs also only for one, or only for several, ``micro_batches`` a step; a model's for the ``shapes`` of its inputs,
    as code for others is other code. ``closed`` says why nothing is
    allowed whatever passed, such as a harness whose detectors are not proved.
    """
    best = {phase: highest_safe(results, phase) for phase in phases}
    allowed = {phase: found.case.rung.name if found and not closed else None for phase, found in best.items()}
    return {
        "train": allowed.get("train"),
        "inference": allowed.get("inference"),
        "fingerprint": dict(fingerprint),
        "micro_batches": micro_batches,
        "shapes": [list(shape) for shape in shapes],
        "worth": {
            phase: _worth(found.observation.cost if found and found.observation else None, toolchain_s)
            for phase, found in best.items()
        },
        "closed": closed,
    }


def why_unproved(proofs: Sequence[Proof]) -> str:
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
