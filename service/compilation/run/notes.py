"""Describes in sentences, for the report, what is particular about a program and how it is judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from service.compilation.monitor.usage import Usage
from service.compilation.run.baseline import Baseline

_NAMED = 5


def names_of(names: Iterable[str], *, most: int = _NAMED, between: str = ", ") -> str:
    """Return the first few names, and the number of the rest."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return between.join(listed[:most]) + more


def notes_on_program(baseline: Baseline, usage: Usage) -> Iterator[str]:
    """Yield what the uncompiled runs have shown, then what the ``usage`` of the compiled modules has."""
    if baseline.eager.random:
        yield "draws random numbers"
    if baseline.overwritten:
        yield f"updates in place what it is given: {', '.join(baseline.overwritten)}"
    if baseline.noise:
        apart = f"{baseline.noise:.2%} of a tensor's size"
        yield f"two eager runs differ, by up to {apart}; the tolerance is wider by that"
    yield from _notes_on_precision(baseline)
    if baseline.unused:
        names = names_of(sorted(baseline.unused))
        yield f"no gradient, in eager neither, and no loss depends on them: {names}"
    if len(threads := dict.fromkeys(call.thread for call in usage.invocations)) > 1:
        yield f"compiled modules are called from several threads: {', '.join(threads)}"
    if usage.outside:
        yield f"called past the boundary: {', '.join(sorted({str(origin) for origin in usage.outside}))}"
    for each, count in baseline.calls.items():
        if each.is_bypass:
            yield f"{each} is called {count} times, which does not go through the compiled forward of {each.unit}"


def _notes_on_precision(baseline: Baseline) -> Iterator[str]:
    if moved := baseline.hidden_by_tf32:
        yield (
            f"TF32 (allow_tf32) moves eager's own results by up to {moved:.1%} of their size, and would hide errors: "
            "judged, and timed, in full float32"
        )
    if baseline.rounds_to_tf32:
        yield "float32 factors may be rounded to TF32 (allow_tf32); the tolerance is wider by twice what that moves"
