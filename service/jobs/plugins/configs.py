"""Defines the configurations of families, sources, objectives and programs, which answer without torch.

Data gives, and a model reads, :data:`Samples`: their numbers must match.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.jobs.spec.common import ParallelSpec, Strict

IGNORED = -100
"""The label of what is left out of the loss, as collators of Hugging Face's libraries write it."""


@dataclass(frozen=True)
class Features:
    """Vectors with one class label each; ``limits`` are the least and the largest number in them, where known.

    ``shape`` is that of one input whose axes mean something, as ``(C, H, W)`` of a picture; ``None``: a vector.
    ``features_field`` and ``classes_field`` name the fields of a configuration that hold the numbers; ``None``: the
    number comes from several fields.
    """

    features: int
    classes: int
    limits: tuple[float, float] | None = None
    features_field: str | None = None
    classes_field: str | None = None
    shape: tuple[int, ...] | None = None

    def holds(self, shape: Sequence[int]) -> bool:
        """Return whether an input of ``shape`` has its numbers in this order: it is flat, or has this shape but for
        axes of length 1.
        """
        own = _longer_axes(self.shape or (self.features,))
        return tuple(shape) == (self.features,) or _longer_axes(shape) == own


def _longer_axes(shape: Sequence[int]) -> list[int]:
    """Return the shape without axes of length 1, which change no order."""
    return [length for length in shape if length != 1]


@dataclass(frozen=True)
class Tokens:
    """Sequences of token ids below ``vocabulary``; ``sequence`` is their length, or the longest that a model reads."""

    vocabulary: int
    sequence: int
    vocabulary_field: str | None = None
    sequence_field: str | None = None


Samples = Features | Tokens


Reason = tuple[str, str, Any, str]
"""The reason why something does not fit: (path, message, got, expected)."""


class ModelConfig(Strict):
    """Base of a family's configuration, which adds ``family: Literal["its name"] = "its name"`` and its fields."""

    family: str

    @property
    def places(self) -> int:
        """Blocks in the chain, and so the most stages of a pipeline; 1 by default."""
        return 1

    @property
    def divided(self) -> Mapping[str, int]:
        """Sizes that must divide over tensor-parallel ranks, by field (``hidden.0``); without any it is whole."""
        return {}

    @property
    @abstractmethod
    def reads(self) -> Samples:
        """Return the samples that the model reads."""

    @property
    def synchronises(self) -> bool:
        """Whether batch normalisation takes its statistics over all data-parallel ranks, so that every layout computes
        what one process does; else each rank normalises by its own, and running statistics are the ranks' mean.
        """
        return True

    def flop_per_sample(self, parameters: int, sequence: int) -> int:
        """Return the floating-point operations to train on one sample, forward and backward, without recomputation.

        ``sequence`` is 1 if samples are not sequences. ``6·N`` holds where each weight is used once per sample or
        token (Kaplan et al., 2020).
        """
        return 6 * parameters * sequence

    def check_parallel(self, parallel: ParallelSpec, stages: int) -> list[Reason]:
        """Return reasons why this model cannot be cut into ``stages`` over the ranks of ``parallel``."""
        problems: list[Reason] = []
        if stages > self.places:
            per_rank = stages // parallel.pp
            arithmetic = f"pp={parallel.pp} × {per_rank} per rank = {stages} stages"
            message = f"{arithmetic}, but this {self.family} has {self.places} blocks and a stage needs one"
            most = self.places // per_rank
            expected = f"at most {most}" if most else f"at most {self.places} stages"
            problems.append(("parallel.pp", message, parallel.pp, expected))
        if parallel.tp > 1 and not self.divided:
            message = f"{self.family} has no layers that tensor parallelism divides"
            problems.append(("parallel.tp", message, parallel.tp, "1"))
        for field, size in self.divided.items():
            if size % parallel.tp:
                message = f"{size} does not divide by tp={parallel.tp}"
                problems.append((f"model.{field}", message, size, f"a multiple of {parallel.tp}"))
        return problems


class DataConfig(Strict):
    """Base of a source's configuration, which adds ``source: Literal["its name"] = "its name"`` and its fields."""

    source: str

    @property
    @abstractmethod
    def gives(self) -> Samples:
        """Return the samples that the source gives; a model must read the same."""

    @property
    def ignores(self) -> bool:
        """Whether a label may be :data:`IGNORED`: that of a sample, or of a token, which is left out of the loss."""
        return True

    @property
    def held_out(self) -> int | None:
        """Samples in the test split; ``None`` if only ranks know."""
        return None


class ObjectiveConfig(Strict):
    """Base of an objective's configuration, which adds ``name: Literal["its name"] = "its name"`` and its fields."""

    name: str

    def check(self, spec: Any, samples: Samples) -> list[Reason]:
        """Return reasons why the job that names it, a ``TrainSpec``, cannot minimise it on such samples."""
        return []


class ProgramConfig(Strict):
    """Base of a program's configuration, which adds ``name: Literal["its name"] = "its name"`` and its fields."""

    name: str

    def check(self, spec: Any) -> list[Reason]:
        """Return reasons why the job that names it cannot run it, as on the mesh or in the phases that it asks for:
        a ``CompileSpec``, a ``TrainSpec`` or a ``RunSpec``, by its ``kind``.
        """
        return []
