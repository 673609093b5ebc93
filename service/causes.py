"""Follows errors to what caused them."""

from __future__ import annotations

from collections.abc import Iterator


def causes(error: BaseException | None, *, handled: bool = True) -> Iterator[BaseException]:
    """Yield an error and its causes, each once: one that is raised from itself is its own cause. Without another cause,
    it is what was being ``handled`` when an error was raised.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or (error.__context__ if handled else None)
