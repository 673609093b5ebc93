"""Defines the building blocks of specs: strict models, and the error of fields that contradict each other."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
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


class Strict(BaseModel):
    """A frozen spec fragment that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
