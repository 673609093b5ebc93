"""Linear constraints on inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from service.jobs.vnnlib.tokens import Token

Terms = list[tuple[str, int, float]]


@dataclass(frozen=True)
class Linear:
    """``Σ terms + constant ≤ 0``; ``token`` is where it came from."""

    terms: tuple[tuple[str, int, float], ...]
    constant: float
    token: Token


def collected(terms: Terms) -> tuple[tuple[str, int, float], ...]:
    """One term for each variable, those that cancel left out."""
    total: dict[tuple[str, int], float] = {}
    for name, index, factor in terms:
        total[name, index] = total.get((name, index), 0.0) + factor
    return tuple((name, index, factor) for (name, index), factor in total.items() if factor)
