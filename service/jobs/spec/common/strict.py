"""Defines the building blocks of specs: strict models, and the error of fields that contradict each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, get_args

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

DISAGREEMENT = "disagreement"
"""Type of the error about fields that contradict each other; its context has the arguments of :func:`disagreement`."""


def disagreement(field: str, message: str, got: Any, expected: str) -> PydanticCustomError:
    """Return the error of a validator of a whole fragment about a field that contradicts others: the field to
    change first.
    """
    return PydanticCustomError(
        DISAGREEMENT, "{field}: {message}; expected {expected}",
        {"field": field, "message": message, "got": got, "expected": expected},
    )  # fmt: skip


def _refuse_unrecorded(value: Any) -> Any:
    try:
        orjson.dumps(value)
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PydanticCustomError("unrecorded", "it cannot be kept as JSON: {why}", {"why": str(error)}) from None
    return value


Recorded = Annotated[Any, AfterValidator(_refuse_unrecorded)]
"""A value of any type that records can keep: no number beyond 64 bits or not finite, no half of a character, and no
endless nesting.
"""


class Strict(BaseModel):
    """A frozen spec fragment that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, given: Any) -> Any:
        """Refuse true and false for a number, which Python takes for 1 and 0: ``every: true`` would be every step."""
        for name in _numbers(cls).intersection(given) if isinstance(given, dict) else ():
            value = given[name]
            if any(isinstance(each, bool) for each in (value if isinstance(value, list) else (value,))):
                raise disagreement(name, "true and false are no numbers here", value, "a number")
        return given


@cache
def _numbers(model: type[BaseModel]) -> frozenset[str]:
    """Return the fields, as they are written, that take numbers and no truth values."""
    fields = {field.alias or name: (field.annotation, *field.metadata) for name, field in model.model_fields.items()}
    types = {name: [each for part in parts for each in _types_in(part)] for name, parts in fields.items()}
    return frozenset(
        name for name, taken in types.items() if (int in taken or float in taken) and not any(map(_may_be_truth, taken))
    )


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield a type and what it is made of."""
    yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)


def _may_be_truth(part: Any) -> bool:
    """Return whether a part of a type takes true or false, or a validator of its own decides."""
    return part is bool or part is Any or isinstance(part, (bool, BeforeValidator, PlainValidator, WrapValidator))
