"""Writes the report's summary: a few sentences, to be read in ten seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.compilation.diagnosis import Diagnosis, Reproduction
from service.compilation.judgement import Result
from service.compilation.run.notes import names_of
from service.compilation.verdicts import Verdict
from service.jobs.spec.compile import Phase

_TITLES: dict[Phase, str] = {"train": "Training", "inference": "Inference"}
_FOOT = "eager"
"""The rung that captures graphs and runs them unchanged: it gains nothing."""
WORDS: dict[Verdict, str] = {
    "unstable": "never comes to rest",
    "fail_break": "breaks a graph",
    "fail_parity": "computes something else",
    "frozen": "does not train",
    "vacuous": "proves nothing",
    "fail_error": "raises an error",
    "fail_lifetime": "overwrites what is still needed",
    "not_reached": "was not reached",
    "timeout": "was given up",
}


def summary(results: Sequence[Result], gate: Mapping[str, Any]) -> list[str]:
    """Tell for each phase the highest allowed rung, the obstacle of the climb and the gain of compiling; then
    add other observations.
    """
    sentences = [f"Nothing may be compiled: {gate['closed']}."] if gate["closed"] else []
    for phase in gate["worth"]:
        of_phase = [result for result in results if result.case.phase == phase]
        verb = "" if gate["closed"] else f" {_permission(gate[phase])}"
        sentences.append(f"{_TITLES[phase]}{verb}: {_describe_climb(of_phase, told=gate[phase])}.")
        if gate[phase] and gate[phase] != _FOOT:
            sentences.append(_worth(phase, gate["worth"][phase]))
        sentences.extend((*_describe_unused(phase, of_phase), *_describe_rehearsal(phase, of_phase)))
    return sentences + list(_breaks(results))


def _permission(allowed: str | None) -> str:
    if allowed is None:
        return "must not be compiled"
    return "has nothing to gain from compiling" if allowed == _FOOT else f"may be compiled with {allowed}"


def _describe_climb(results: Sequence[Result], told: str | None) -> str:
    """Return how far the climb went, unless that was ``told``, and its obstacle."""
    stopped = next((result for result in results if result.verdict not in ("pass", "not_applicable")), None)
    passed = [result.case.rung.name for result in results if result.verdict == "pass"]
    if stopped is not None:
        reason = stopped.findings[0].message if stopped.findings else "no reason was recorded"
        before = f"{passed[-1]} passed, " if passed and passed[-1] not in {told, _FOOT} else ""
        return f"{before}{stopped.case.rung.name} {WORDS[stopped.verdict]} ({reason})"
    apart = [result for result in results if result.verdict == "not_applicable"]
    of_device = [result.case.rung.name for result in apart if result.observation is None]
    of_itself = [
        f"{each.case.rung.name} not applicable ({each.findings[0].message})" for each in apart if each.observation
    ]
    there = [f"{' and '.join(of_device)} not applicable on this device"] if of_device else []
    rest = "".join(f"; {each}" for each in (*of_itself, *there))
    only = f"only {_FOOT}, which compiles nothing, was tried and passed"
    return (only if passed == [_FOOT] else f"all {len(passed)} rungs passed") + rest


def _describe_unused(phase: Phase, results: Sequence[Result]) -> list[str]:
    """Return the parameters that affect no loss."""
    training = next((each.observation.training for each in results if each.observation), None)
    if training is None or not training.unused:
        return []
    names = names_of(sorted(training.unused))
    return [f"{_TITLES[phase]} does not change {names}, in eager either: no loss depends on them."]


def _describe_rehearsal(phase: Phase, results: Sequence[Result]) -> list[str]:
    """Return the first objection to CUDA graphs on a device that has them, if they could only be rehearsed."""
    found = [each.message for result in results if result.rehearsal for each in result.findings[1:]]
    return [f"{_TITLES[phase]} would go wrong with CUDA graphs ({found[0]})."] if found else []


def _worth(phase: Phase, worth: Mapping[str, Any]) -> str:
    if worth["ratio"] is None:
        return f"The gain of compiling {phase} was not measured."
    pace = f"a compiled step takes {worth['ratio']:.2f}× an eager one"
    if not worth["worth_it"]:
        untold = f"The gain is unclear: the timing was noisy ({worth['ratio']:.2f}×)."
        return untold if worth["noisy"] else f"It is not worth it: {pace}."
    doubt = " (the timing was noisy)" if worth["noisy"] else ""
    steps = worth["break_even_steps"]
    paid = f", compiling is paid back after {steps:,} steps" if steps is not None else ""
    return f"It is worth it: {pace}{doubt}{paid}."


def _breaks(results: Sequence[Result]) -> list[str]:
    """Return the first place at which any rung breaks the graph, and how many more there are."""
    places: dict[tuple[str, int], str] = {}
    for result in results:
        for each in result.observation.evidence.graph_breaks if result.observation else ():
            places.setdefault((each.file, each.line), each.reason)
    if not places:
        return []
    (file, line), reason = next(iter(places.items()))
    where = f" at {file}:{line}" if file else ""
    more = f", and {len(places) - 1} more" if len(places) > 1 else ""
    return [f"The graph breaks{where} ({reason}){more}."]


def causes(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Tell for each failed rung the smallest module that fails, and the script that shows it."""
    return [_cause(found) for found in diagnoses]


def _cause(found: Diagnosis) -> str:
    of = f"{found.phase}, {found.rung}"
    if found.module is None and found.ended:
        return f"The failing module was not found in time ({of})."
    if found.module is None:
        return f"No module fails alone ({of}): only several together do."
    shown, until = found.reproduction, ", of those tried in time," if found.ended else ""
    smallest = f"The smallest module that fails{until} is {found.module} ({of})"
    return f"{smallest}; {shown.script} {_certainty(shown)}." if shown.script else f"{smallest}."


def _certainty(shown: Reproduction) -> str:
    if shown.confirmed is None:
        return f"was written; whether it fails in a process of its own was not measured, as {shown.said}"
    return "shows it" if shown.confirmed else "was written, but does not fail in a process of its own"
