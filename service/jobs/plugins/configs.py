"""Defines the configurations of families, sources, objectives, optimizers, schedules and programs, which answer without
torch.

Data gives, and a model reads, :data:`Samples`: their numbers must match.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

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
        """Return the number of blocks in the chain, and so the most stages of a pipeline; 1 by default."""
        return 1

    @property
    def divided(self) -> Mapping[str, int]:
        """Return sizes that tensor-parallel ranks must divide, by field (``hidden.0``); without any it is whole."""
        return {}

    @property
    @abstractmethod
    def reads(self) -> Samples:
        """Return the samples that the model reads."""

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Return the names of its parameters, by which jobs group them; none if only ranks know."""
        return ()

    @property
    def synchronises(self) -> bool:
        """Return whether batch normalisation takes its statistics over all data-parallel ranks, so that every layout
        computes what one process does; else each rank normalises by its own, and running statistics are their mean.
        """
        return True

    @property
    def takes_float8(self) -> bool:
        """Return whether its blocks have linear layers of Trivet's, which ``precision.float8`` is about; ranks look for
        them if it is not overridden.
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
            blocks = "1 block" if self.places == 1 else f"{self.places} blocks"
            message = f"{arithmetic}, but this {self.family} has {blocks} (`places`) and a stage needs one"
            most = self.places // per_rank
            expected = f"at most {most}" if most else f"at most {self.places} stages"
            problems.append(("parallel.pp", message, parallel.pp, expected))
        if parallel.tp > 1 and not self.divided:
            message = f"{self.family} has no layers that tensor parallelism divides (`divided`)"
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
        """Return whether a label may be :data:`IGNORED`: that of a sample or of a token, left out of the loss."""
        return True

    @property
    def held_out(self) -> int | None:
        """Return the number of samples in the test split; ``None`` if only ranks know."""
        return None


class ObjectiveConfig(Strict):
    """Base of an objective's configuration, which adds ``name: Literal["its name"] = "its name"`` and its fields."""

    name: str

    def check(self, spec: Any, samples: Samples) -> list[Reason]:
        """Return reasons why the job that names it, a ``TrainSpec``, cannot minimise it on such samples."""
        return []

    @property
    def compiles(self) -> bool:
        """Return whether it can be computed of a compiled model, so that a compile check may take it."""
        return True

    def better(self, samples: Samples) -> Mapping[str, Better]:
        """Return the metrics of an evaluation, each with the end that is better; none if only ranks know them."""
        return {}


Better = Literal["min", "max"]
"""Whether the least or the greatest value of a metric is the best."""
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""Names of parameters, as ``fnmatch`` reads them: ``blocks.*.bias``."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a parameter's name fits one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class ParameterGroup(Strict):
    """Parameters that are updated otherwise than the rest. A parameter belongs to the first group that matches it."""

    match: tuple[Pattern, ...] = Field(
        min_length=1, max_length=64, description="names of parameters, such as head.weight or *.bias"
    )
    lr_scale: float = Field(1.0, gt=0, description="the factor on the optimizer's lr")
    weight_decay: float | None = Field(None, ge=0, description="weight decay; the optimizer's own when absent")
    frozen: bool = Field(False, description="whether these stay as they are: their gradients are not used or clipped")


class OptimizerConfig(Strict):
    """Base of an optimizer's configuration, which adds ``name: Literal["its name"] = "its name"`` and its fields."""

    name: str
    lr: float = Field(1e-3, gt=0, description="the learning rate at its peak, which the schedule scales")
    weight_decay: float = Field(0.0, ge=0, description="weight decay, decoupled from the gradient, per step times lr")
    clip_norm: float | None = Field(1.0, gt=0, description="limit on the global gradient norm; null switches it off")
    groups: tuple[ParameterGroup, ...] = Field(
        (),
        max_length=64,
        exclude_if=lambda groups: not groups,  # a worker of an older version does not know the field
        description="parameters that are updated otherwise, by patterns of their names",
    )

    def patterns(self) -> dict[str, tuple[str, ...]]:
        """Return all patterns of names by field; each must name a parameter."""
        return {f"groups.{index}.match": group.match for index, group in enumerate(self.groups)}

    def check(self, names: Sequence[str]) -> list[Reason]:
        """Return reasons why it cannot update a model whose parameters have these names."""
        reasons: list[Reason] = []
        for field, patterns in self.patterns().items():
            for pattern in patterns:
                if not any(matches(name, (pattern,)) for name in names):
                    near = ", ".join(get_close_matches(pattern, names, n=3, cutoff=0))
                    reasons.append((f"optimizer.{field}", "no parameter has this name", pattern, f"one such as {near}"))
        if all(self._freezes(name) for name in names):
            reasons.append(("optimizer.groups", "every parameter is frozen", None, "one that learns"))
        return reasons

    def _freezes(self, name: str) -> bool:
        return next((group.frozen for group in self.groups if matches(name, group.match)), False)

    def keeps(self) -> dict[str, Any]:
        """Return, by field, what decides the state that it keeps of each parameter: a job that resumes another one
        must agree with it.
        """
        frozen = any(group.frozen for group in self.groups)
        return {"name": self.name, "groups": [(each.match, each.frozen) for each in self.groups] if frozen else []}


@dataclass(frozen=True)
class Evaluation:
    """The metrics of an evaluation after so many steps."""

    step: int
    metrics: Mapping[str, float]


class ScheduleConfig(Strict):
    """Base of a learning-rate schedule's configuration, which adds ``decay: Literal["its name"] = "its name"`` and its
    fields. It needs no other program.
    """

    decay: str
    warmup: int = Field(0, ge=0, description="steps in which the rate rises linearly to its peak")

    @abstractmethod
    def decayed(self, step: int, steps: int, evaluations: Sequence[Evaluation]) -> float:
        """Return the share of the peak rate in ``step`` (from 0) of ``steps``, once the warmup is over.

        It follows from the arguments alone. ``evaluations`` are those before this step that have a metric of
        :attr:`follows`.
        """

    def share(self, step: int, steps: int, evaluations: Sequence[Evaluation] = ()) -> float:
        """Return the share of the peak rate in ``step``; the first step of a warmup is not zero."""
        return (step + 1) / self.warmup if step < self.warmup else self.decayed(step, steps, evaluations)

    @property
    def follows(self) -> Mapping[str, Better]:
        """Return the metrics of evaluations that it depends on, and which end of each it takes for the better one."""
        return {}

    def check(self, spec: Any) -> list[Reason]:
        """Return reasons why the job that names it, a ``TrainSpec``, cannot follow it."""
        if self.warmup <= spec.steps:
            return []
        message = f"the rate would not reach its peak in steps={spec.steps}"
        return [("schedule.warmup", message, self.warmup, f"at most {spec.steps}")]


class ProgramConfig(Strict):
    """Base of a program's configuration, which adds ``name: Literal["its name"] = "its name"`` and its fields."""

    name: str

    def check(self, spec: Any) -> list[Reason]:
        """Return reasons why the job that names it cannot run it, as on the mesh or in the phases that it asks for:
        a ``CompileSpec``, a ``TrainSpec`` or a ``RunSpec``, by its ``kind``.
        """
        return []
