"""Reports replays that overwrite data still needed: held results, saved tensors of pending backwards, gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from service.compilation.monitor.usage import Mark, Reentry, RetainedRead, StaleGradient, StaleRead, Usage
from service.compilation.run.notes import names_of
from service.compilation.run.observation import Observation
from service.compilation.verdicts import Finding
from service.parallel.boundary import CallSite, HeldResult

NAMED = 4
_REMEDY = "copy it at the boundary (kept), outside of compiled code, or consume it before"
_Item = TypeVar("_Item")
Group = TypeVar("Group", bound=Hashable)


def detect(observation: Observation) -> Iterator[Finding]:
    """Find results that outlive a replay, if replays overwrite results: otherwise holding one is fine."""
    if observation.case.rung.overwrites:
        messages = list(_messages(observation.usage)) or list(_suspects(observation))
        yield from (Finding("fail_lifetime", message) for message in messages)


def _messages(usage: Usage) -> Iterator[str]:
    pending = [mark for mark in usage.marks if mark.pending]
    for site, marks in _group(pending, lambda mark: str(mark.site)).items():
        yield _describe_marks(site, marks)
    unsafe = [each for each in usage.reentries if each.begins]
    places = _group(unsafe, lambda call: (call.module, str(call.site), call.in_backward))
    for (module, site, inside), calls in places.items():
        yield _called_too_early(module, site, inside, calls)
    for _, reads in _group(usage.reads, lambda each: (_call(each.held), each.site)).items():
        yield _read(reads)
    # The autograd graph holds what a pending backward saved; the mark has already been reported for that.
    held = [each for each in usage.held if each.holders or not pending]
    read = {_call(each.held) for each in usage.reads}
    for call, results in _group(held, _call).items():
        if call not in read:
            yield _describe_held(results)
    for site, gradients in _group(usage.gradients, lambda each: str(each.site)).items():
        yield _stale(site, gradients)
    for (module, place), retained in _group(usage.retained, lambda each: (each.origin.module, each.site)).items():
        yield _describe_retained(module, place, retained)


def _suspects(observation: Observation) -> Iterator[str]:
    """Yield a message, if results went wrong, on those that were alive when they were overwritten, and may have
    been read afterwards.
    """
    alive = [each for each in observation.usage.overlapping if each.holders]
    wrong = not all(comparison.passed for comparison in observation.comparisons) or "overwritten" in observation.error
    if alive and wrong:
        of_calls = [str(results[0]) for results in _group(alive, _call).values()]
        yield (
            "results are wrong, and no stale read was seen; the cause may be a result held over a replay, "
            f"which overwrites it: {names_of(of_calls, most=NAMED, between='; or ')}"
        )


def _describe_marks(site: str, marks: list[Mark]) -> str:
    origins = names_of(dict.fromkeys(str(origin) for mark in marks for origin in mark.pending), most=NAMED)
    most = max(len(mark.pending) for mark in marks)
    return (
        f"a step is marked at {site} while up to {most} backwards are still to run, of {origins} "
        f"({_when(mark.iteration for mark in marks)}): replays overwrite what they have saved, "
        "and gradients are wrong; mark once per optimizer step, when all backwards have run (step_boundary)"
    )


def _called_too_early(module: str, site: str, inside: bool, calls: list[Reentry]) -> str:
    when = "again within a running backward" if inside else "while other forwards still wait for their backward"
    return (
        f"{module} is called {when}, at {site} ({_when(each.iteration for each in calls)}): "
        "replays begin there, and overwrite memory still in use; mark steps (step_boundary)"
    )


def _call(held: HeldResult) -> tuple[str, CallSite, tuple[int, ...]]:
    return held.origin.module, held.origin.site, held.shape


def _read(reads: list[StaleRead]) -> str:
    holders = tuple(dict.fromkeys(holder for each in reads for holder in each.held.holders))
    return (
        f"held over a replay, which overwrites it, and read at {reads[0].site} "
        f"({_when(each.iteration for each in reads)}): {replace(reads[0].held, holders=holders)}; {_REMEDY}"
    )


def _describe_held(results: list[HeldResult]) -> str:
    first = results[0]
    again = f", and {len(results) - 1} more" if len(results) > 1 else ""
    return f"held over a replay, which overwrites it, and may be read after it: {first}{again}; {_REMEDY}"


def _stale(site: str, gradients: list[StaleGradient]) -> str:
    names = dict.fromkeys(each.parameter for each in gradients)
    return (
        f"gradients are accumulated or used over replays, which begin at {site} and overwrite them "
        f"({_when(each.iteration for each in gradients)}): {names_of(names, most=NAMED)}; "
        "mark once per optimizer step (step_boundary), so that its micro-batches are one round of replays"
    )


def _describe_retained(module: str, site: CallSite, reads: list[RetainedRead]) -> str:
    when = _when(each.iteration for each in reads)
    return (
        f"the gradient that a result of {module} retains is read at {site} ({when}): "
        "each replay gives out the same tensor, which keeps the gradient of the first; ask torch.autograd.grad for it, "
        "or let the result be an input of what comes after it"
    )


def _group(items: Iterable[_Item], key: Callable[[_Item], Group]) -> dict[Group, list[_Item]]:
    groups: dict[Group, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _when(iterations: Iterable[int]) -> str:
    distinct = sorted(set(iterations))
    numbers = ", ".join(map(str, distinct[:NAMED])) + (", …" if len(distinct) > NAMED else "")
    return f"iteration{'s' if len(distinct) > 1 else ''} {numbers}"
