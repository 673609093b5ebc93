"""Defines the row that a verification job reports for each instance.

The event that carries it, the line of the resume log, the columns of ``bounds.parquet`` and the model in the OpenAPI
document are derived from :class:`BoundsRow`. The dashboard's type (``api/dashboard/static/lib/types.js``) repeats its
fields, and a test compares the two. A further field needs a default, since rows of older jobs are read without it;
``api/dashboard/static/job/verify.js`` and ``trivet/cli/results.py`` choose the columns to show.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Infinite = Literal["-Infinity", "Infinity"]
"""A bound that is not finite, as a text, since JSON has no such numbers."""
Bound = float | None | Infinite
"""An end of an output's bounds; rows of older jobs have ``None`` for one that is not finite."""
RowVerdict = Literal["verified", "falsified", "unknown", "timeout"]
ROW_VERDICTS: tuple[RowVerdict, ...] = get_args(RowVerdict)


@dataclass(frozen=True, kw_only=True)
class BoundsRow:
    """Certified output bounds of one instance.

    A bound that overflows is infinite, and ``reason`` names the first operator where bounds overflow. ``margin`` is
    the least certified distance from a violation: above zero (beyond rounding) means verified. ``name`` is the
    query's path in its archive; ``label`` and ``prediction`` are the class of a sample and the model's for it.
    ``decided_by`` says what decided the verdict: bounds, a witness (the sample itself, the centre of the box), an
    attack, or a search by splitting inputs or activations. ``reason`` says why there is none. ``note`` is a remark on
    the bounds, such as that the model is in half precision. ``counterexample_outputs`` are the model's outputs at the
    counterexample, in float64; ``onnxruntime_outputs`` are onnxruntime's outputs there, for a model from ONNX.
    ``sample`` is the labelled sample around which a counterexample was found, if it has no more than 80,000 features,
    and ``sample_outputs`` the model's outputs for it.
    """

    instance: int
    name: str | None = None
    label: int | None = None
    prediction: int | None = None
    verdict: RowVerdict
    lower: list[Bound]
    upper: list[Bound]
    margin: float | None
    method: str
    decided_by: str | None = None
    reason: str | None = None
    note: str | None = None
    seconds: float
    domains: int
    counterexample: list[float] | None
    counterexample_outputs: list[float | None] | None = None
    onnxruntime_outputs: list[float | None] | None = None
    sample: list[float] | None = None
    sample_outputs: list[float | None] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, in order; lists are the row's own, not copies."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
