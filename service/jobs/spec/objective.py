"""Defines the objectives of training: the built-in ones, and those of installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BeforeValidator, Field, model_validator

from service.jobs.plugins import Better, Features, ObjectiveConfig, ObjectiveKind, Reason, Samples, disagreement
from service.jobs.plugins.catalogue import catalogue
from service.jobs.spec.arithmetic import ActivationCheckpoint, CompileChoice, PrecisionSpec
from service.jobs.spec.common import ParallelSpec

_MOST_CLASSES = 128


class _TrainingFields(Protocol):
    """The fields of a ``TrainSpec`` that objectives here ask for."""

    @property
    def parallel(self) -> ParallelSpec: ...

    @property
    def precision(self) -> PrecisionSpec: ...

    @property
    def activation_checkpoint(self) -> ActivationCheckpoint: ...

    @property
    def compile(self) -> CompileChoice: ...


class CrossEntropy(ObjectiveConfig):
    """Mean cross entropy over samples, or over the tokens of sequences."""

    name: Literal["cross_entropy"] = Field("cross_entropy", description="plain training")

    def better(self, samples: Samples) -> Mapping[str, Better]:
        if isinstance(samples, Features):
            return {"eval_loss": "min", "eval_accuracy": "max"}
        return {"eval_loss": "min", "eval_perplexity": "min"}


class Certified(ObjectiveConfig):
    """Cross entropy of worst-case logits within ``eps`` (L∞) of each input, beside that of the input itself.

    The loss is ``κ·clean + (1 − κ)·worst case`` (Gowal et al., 2018). eps is 0 for ``warmup`` steps and grows linearly
    to its full size over ``ramp`` steps; κ falls from 1 to ``kappa`` meanwhile. With ``crown-ibp`` the worst case is
    ``β·CROWN-IBP + (1 − β)·IBP``, and β falls from 1 to ``beta`` (Zhang et al., 2020).
    """

    name: Literal["certified"] = Field("certified", description="training for certified accuracy")
    eps: float = Field(gt=0, description="radius of the ball around each sample, in the data's units")
    bound: Literal["ibp", "crown-ibp"] = Field(
        "ibp", description="method of the bounds on the ball of eps around a sample"
    )
    warmup: int = Field(0, ge=0, description="steps with eps 0")
    ramp: int = Field(0, ge=0, description="steps over which eps grows")
    kappa: float = Field(0.5, ge=0, le=1, description="weight of the clean loss at the end")
    beta: float = Field(0.0, ge=0, le=1, description="crown-ibp: weight of the CROWN-IBP bound at the end")
    lower: float | None = Field(None, description="least number in an input; the source's own when absent")
    upper: float | None = Field(None, description="largest number in an input; the source's own when absent")

    @model_validator(mode="after")
    def _lower_is_below_upper(self) -> Certified:
        if self.lower is not None and self.upper is not None and self.lower >= self.upper:
            raise disagreement(
                "lower", "inputs lie between lower and upper", self.lower, f"less than upper={self.upper}"
            )
        return self

    def limits(self, known: tuple[float, float] | None) -> tuple[float | None, float | None]:
        """Return the limits of the inputs, as far as they are given; ``known`` are the source's own."""
        low, high = known or (None, None)
        return (low if self.lower is None else self.lower), (high if self.upper is None else self.upper)

    @property
    def compiles(self) -> bool:
        return False

    def better(self, samples: Samples) -> Mapping[str, Better]:
        return {"eval_loss": "min", "eval_accuracy": "max", "eval_certified_accuracy": "max"}

    def check(self, spec: _TrainingFields, samples: Samples) -> list[Reason]:
        reasons: list[Reason] = []
        if not isinstance(samples, Features):
            message = "token ids have no neighbourhood to certify"
            reasons.append(("objective.name", message, self.name, "cross_entropy, or data of features"))
        elif samples.classes > _MOST_CLASSES:
            message = f"all pairs of {samples.classes} classes are bounded: {samples.classes**2} rows"
            reasons.append(("objective.name", message, self.name, f"data of at most {_MOST_CLASSES} classes"))
        elif reason := self._explain_crossed_limits(samples.limits):
            reasons.append(reason)
        if self.bound == "crown-ibp" and spec.parallel.pp > 1:
            message = f"a backward pass over bounds does not cross the stages of a pipeline, pp={spec.parallel.pp}"
            reasons.append(("objective.bound", message, self.bound, "ibp, or parallel.pp of 1"))
        plain = {
            "activation_checkpoint": (spec.activation_checkpoint, "none"),
            "precision.param": (spec.precision.param, "fp32"),
            "precision.float8": (spec.precision.float8, False),
            "compile.train": (spec.compile.train, False),
            "compile.inference": (spec.compile.inference, False),
        }
        for path, (got, wanted) in plain.items():
            if got != wanted:
                reasons.append((path, "bounds are computed without it", got, str(wanted).lower()))
        return reasons

    def _explain_crossed_limits(self, known: tuple[float, float] | None) -> Reason | None:
        """Say why the given limit contradicts the other one, which the source knows."""
        low, high = self.limits(known)
        if low is None or high is None or low < high:
            return None
        if self.lower is not None:
            return "objective.lower", f"no input of this source is above {high}", low, f"less than {high}"
        return "objective.upper", f"no input of this source is below {low}", high, f"more than {low}"


OBJECTIVES = catalogue(
    ObjectiveKind,
    (
        ObjectiveKind(CrossEntropy, "service.objectives.cross_entropy:objective"),
        ObjectiveKind(Certified, "service.objectives.certified:certified"),
    ),
)

if TYPE_CHECKING:
    ObjectiveSpec = ObjectiveConfig
else:
    ObjectiveSpec = OBJECTIVES.choice(BeforeValidator(OBJECTIVES.read_name))
