"""Replays counterexamples as the competition does: by onnxruntime with its own optimisations, in the network's type.

The competition takes a witness whose outputs, as onnxruntime computes them, satisfy the query, and whose inputs are
within :data:`TOLERANCE` of its box; its own numbers of outputs count for nothing (``counterexamples.py`` and
``settings.py`` of the rules). A witness within the box itself proves ``sat``, one beside it gains its points only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf, prod
from typing import TYPE_CHECKING, Any

from service.formats.vnnlib import Disjunct, Query
from trivet.errors import TrivetError
from trivet.vnncomp.answers import Witness

if TYPE_CHECKING:
    import numpy as np

TOLERANCE = Fraction(1, 10_000)
"""How far an input may be from its box, absolutely."""


class ReplayError(TrivetError):
    """The network does not run in onnxruntime as the competition runs it."""


class RefutedError(ReplayError):
    """A counterexample does not hold in onnxruntime."""


@dataclass(frozen=True)
class ConfirmedWitness:
    """A witness that holds; ``is_strict`` says that its inputs are in the box itself."""

    witness: Witness
    is_strict: bool


@dataclass(frozen=True)
class FoundTensor:
    """A tensor that a network takes or gives for a batch of one; ``kind`` is numpy's name of its type."""

    kind: str
    shape: tuple[int, ...]


class ReplayedNetwork:
    """A network in onnxruntime, run as the competition runs it. Raises :class:`ReplayError`."""

    def __init__(self, model: bytes) -> None:
        import onnxruntime  # noqa: PLC0415 - only a counterexample needs it

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        try:
            self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises types of its own, one for each status code
            raise ReplayError(f"onnxruntime cannot load the network: {error}") from error
        self._given = [
            (each.name, tuple(size if isinstance(size, int) and size > 0 else 1 for size in each.shape), each.type)
            for each in self._session.get_inputs()
        ]
        kinds = {kind for _, _, kind in self._given}
        if not kinds <= set(_TYPES):
            raise ReplayError(f"the network's inputs are {', '.join(sorted(kinds))}; expected {', '.join(_TYPES)}")

    @property
    def type(self) -> str:
        """Return numpy's name of the type of the first input."""
        return _TYPES[self._given[0][2]]

    @property
    def given(self) -> list[FoundTensor]:
        """Return the inputs."""
        return [FoundTensor(_TYPES[kind], shape) for _, shape, kind in self._given]

    def shown(self) -> list[FoundTensor]:
        """Return the outputs, as they are at the input 0."""
        import numpy as np  # noqa: PLC0415

        entries = np.zeros(sum(prod(shape) for _, shape, _ in self._given))
        return [FoundTensor(each.dtype.name, each.shape) for each in self._run(entries)]

    def outputs(self, x: np.ndarray[Any, Any], count: int) -> list[float]:
        """Return ``count`` outputs: those of the first one, which alone the competition reads, or of all together."""
        import numpy as np  # noqa: PLC0415

        found = [each.astype(np.float64).ravel() for each in self._run(x)]
        for chosen in (found[0], np.concatenate(found)):
            if len(chosen) == count:
                return [float(value) for value in chosen]
        raise ReplayError(f"the network has {len(found[0])} outputs, and the query {count}")

    def _run(self, x: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        import numpy as np  # noqa: PLC0415

        sizes = [prod(shape) for _, shape, _ in self._given]
        if sum(sizes) != len(x):
            raise ReplayError(f"the network has {sum(sizes)} inputs, and the query {len(x)}")
        parts = np.split(x, np.cumsum(sizes)[:-1])
        feeds = {
            name: part.reshape(shape).astype(_TYPES[kind])
            for (name, shape, kind), part in zip(self._given, parts, strict=True)
        }
        try:
            return [np.asarray(each) for each in self._session.run(None, feeds)]
        except Exception as error:  # as above
            raise ReplayError(f"onnxruntime cannot run the network: {error}") from error


_TYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16"}


def replayed(network: ReplayedNetwork, query: Query, x: Sequence[float]) -> ConfirmedWitness:
    """Return the witness at the numbers of the network's type nearest to ``x``, those in a box of the query before all
    others. Raises :class:`RefutedError` that says why there is none.
    """
    if len(x) != query.inputs:
        raise RefutedError(f"the witness has {len(x)} inputs, and the query {query.inputs}")
    found, nearby = None, False
    for disjunct, rounded in _candidates(network.type, query, x):
        nearby = True
        point = [float(value) for value in rounded]
        outputs = network.outputs(rounded, query.outputs)
        if _holds(disjunct, point, outputs):
            found = ConfirmedWitness(Witness(tuple(point), tuple(outputs)), _lies_in(disjunct, point, Fraction(0)))
            if found.is_strict:
                return found
    if found is None:
        where = "its outputs there do not satisfy the query" if nearby else f"it is more than {float(TOLERANCE):g} away"
        raise RefutedError(f"the counterexample does not hold in onnxruntime: {where}")
    return found


def _candidates(kind: str, query: Query, x: Sequence[float]) -> Iterator[tuple[Disjunct, np.ndarray[Any, Any]]]:
    """Yield the disjuncts whose box has ``x``, or nearly, each with the nearest input of the network's type."""
    import numpy as np  # noqa: PLC0415

    for disjunct in query.disjuncts:
        if _lies_in(disjunct, x, TOLERANCE):
            rounded = np.asarray(x, dtype=kind)
            for index, value in enumerate(rounded.tolist()):
                if not _is_in_interval(disjunct, index, value):
                    up = value <= disjunct.lower[index]
                    inner = np.nextafter(rounded[index], rounded.dtype.type(inf if up else -inf))
                    rounded[index] = inner if _is_in_interval(disjunct, index, float(inner)) else rounded[index]
            if _lies_in(disjunct, rounded.tolist(), TOLERANCE):
                yield disjunct, rounded


def _is_in_interval(disjunct: Disjunct, index: int, value: float) -> bool:
    """Return whether a number is in the interval of an input, which may lack its ends."""
    low, high = disjunct.lower[index], disjunct.upper[index]
    above = value > low if index in disjunct.open_lower else value >= low
    return above and (value < high if index in disjunct.open_upper else value <= high)


def _lies_in(disjunct: Disjunct, x: Sequence[float], slack: Fraction) -> bool:
    if not slack:
        return all(_is_in_interval(disjunct, index, value) for index, value in enumerate(x))
    ends = zip(disjunct.lower, x, disjunct.upper, strict=True)
    return all(Fraction(low) - slack <= value <= Fraction(high) + slack for low, value, high in ends)


def _holds(disjunct: Disjunct, x: Sequence[float], outputs: Sequence[float]) -> bool:
    """Return whether an input and its outputs satisfy all conditions but those of the box, without rounding."""
    return all(each.contains(outputs, outputs) for each in disjunct.halfspaces) and all(
        each.contains(x, x) for each in disjunct.constraints
    )
