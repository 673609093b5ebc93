"""What data gives and what a model reads, in numbers that must fit each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Features:
    """Vectors with one class label each; ``limits`` are the least and the largest number in them, where known.

    ``features_field`` and ``classes_field`` name the fields of a configuration that hold the numbers; ``None``: the
    number comes from several fields.
    """

    features: int
    classes: int
    limits: tuple[float, float] | None = None
    features_field: str | None = None
    classes_field: str | None = None


@dataclass(frozen=True)
class Tokens:
    """Sequences of token ids below ``vocabulary``; ``sequence`` is their length, or the longest that a model reads."""

    vocabulary: int
    sequence: int
    vocabulary_field: str | None = None
    sequence_field: str | None = None


Samples = Features | Tokens
