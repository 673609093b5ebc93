"""Defines the driver's view of a search, :class:`SearchStrategy`, and its reports: progress, result, decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from service.bounds.memory import MemoryShortageError
from service.bounds.methods import Method
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Counterexample, Specification
from service.verification.verdict import Verdict


class Technique(Enum):
    """The technique that decided, or that was at work when time ran out; its value is shown in results."""

    BOUNDS = "bounds"
    ATTACK = "attack"
    INPUTS = "input splitting"
    ACTIVATIONS = "activation splitting"


@dataclass(frozen=True)
class SearchProgress:
    """A moment of a search.

    ``domains`` were bounded, ``open`` wait; ``bound`` is the proved lower bound of the margin over all inputs,
    and never falls during a search. A margin is the distance of the nearest disjunct
    from being satisfied: the property holds where it is positive. Parts that were cut off a box are only known
    to have positive margins, so once there are any, the bound is at most 0.
    """

    domains: int
    open: int
    bound: float


ProgressListener = Callable[[SearchProgress], None]


@dataclass(frozen=True)
class SearchResult:
    """The end of a search: ``bound`` as in :class:`SearchProgress`, and a counterexample that the model confirmed.

    ``shortage`` describes the missing memory if something was left undecided for it; ``is_over`` says that more
    time would change nothing, and ``is_hurried`` that time did not even suffice for the bounds of α-CROWN. The bound of
    a search that ``clips`` all relaxations of a domain says little about how near it is to its end.
    """

    verdict: Verdict
    counterexample: Counterexample | None
    domains: int
    bound: float
    shortage: MemoryShortageError | None = None
    is_over: bool = True
    is_hurried: bool = False
    clips: bool = False


class Search(Protocol):
    """A branch and bound over one specification, which can continue where it stopped."""

    def run(self, deadline: float) -> SearchResult:
        """Search until it is decided, or ``deadline`` (``time.monotonic``) is past. Earlier calls' results count."""


@dataclass(frozen=True, eq=False)
class SearchTask:
    """What a search decides until ``deadline``; ``method`` bounds roots and boxes, ``listener`` hears of rounds."""

    model: ModelUnderVerification
    specification: Specification
    method: Method
    deadline: float
    listener: ProgressListener


SearchStrategy = Callable[[SearchTask], Search]
"""Begins a search. Raises :class:`~service.bounds.memory.MemoryShortageError`, on all ranks that decide together, if it
cannot begin.
"""


@dataclass(frozen=True)
class Decision:
    """``domains`` counts bounded domains, ``bound`` is the least over all specifications; ``technique`` decided the
    query.

    ``attacking`` is the part of the ``seconds`` that the attack before the search took; ``shortage`` and ``is_hurried``
    as in :class:`SearchResult`. ``visited`` are inputs ``(n, features)`` at which a counterexample was nearest, if any.
    """

    verdict: Verdict
    counterexample: Counterexample | None
    domains: int
    seconds: float
    bound: float
    technique: Technique
    attacking: float = 0.0
    shortage: MemoryShortageError | None = None
    visited: Tensor | None = None
    is_hurried: bool = False
