"""What a VNN-LIB file asks, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from service.jobs.archive import UploadError


class VnnlibError(UploadError):
    """The text is not a property of the supported form; the message begins with the line and shows the token."""


@dataclass(frozen=True)
class Halfspace:
    """``Σ coefficients[j]·y[j] ≤ threshold``."""

    coefficients: tuple[tuple[int, float], ...]
    threshold: float


@dataclass(frozen=True)
class Case:
    """One disjunct: a counterexample has its input in the box and its output in all of the halfspaces."""

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    halfspaces: tuple[Halfspace, ...]


@dataclass(frozen=True)
class Within:
    """``‖x − middle‖₂ ≤ distance``."""

    middle: tuple[float, ...]
    distance: float


@dataclass(frozen=True)
class Query:
    """A counterexample satisfies one of ``cases``; the property holds if none of them can be satisfied.

    With ``within``, which no VNN-LIB file can say, it also lies in that ball, which the cases' boxes enclose.
    """

    inputs: int
    outputs: int
    cases: tuple[Case, ...]
    within: Within | None = None
