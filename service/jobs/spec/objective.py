"""What training minimises: the built-in objectives, and those of installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from service.jobs.plugins import Features, ObjectiveConfig, ObjectiveKind, ParallelSpec, Reason, Samples
from service.jobs.plugins.catalogue import catalogue


class CrossEntropy(ObjectiveConfig):
    """Mean cross entropy over samples, or over the tokens of sequences."""

    name: Literal["cross_entropy"] = "cross_entropy"


class Certified(ObjectiveConfig):
    """Cross entropy of worst-case logits within ``eps`` (L∞) of each input, beside that of the input itself.

    The loss is ``kappa·clean + (1 − kappa)·worst case`` (Gowal et al., 2018). eps is 0 for ``warmup`` steps and grows
    linearly to its full size over ``ramp`` steps, while the weight of the clean loss falls from 1 to ``kappa``.
    """

    name: Literal["certified"] = "certified"
    eps: float = Field(gt=0, description="in the data's units")
    bound: Literal["ibp", "crown-ibp"] = Field("ibp", description="what bounds the logits (Zhang et al., 2020)")
    warmup: int = Field(0, ge=0, description="steps with eps 0")
    ramp: int = Field(0, ge=0, description="steps over which eps grows")
    kappa: float = Field(0.5, ge=0, le=1, description="weight of the clean loss at the end")
    lower: float | None = Field(0.0, description="least value that an input can have; null: any")
    upper: float | None = Field(1.0, description="largest value that an input can have; null: any")

    def check_fit(self, samples: Samples, parallel: ParallelSpec) -> list[Reason]:
        reasons: list[Reason] = []
        if not isinstance(samples, Features):
            message = "token ids have no neighbourhood to certify"
            reasons.append(("objective.name", message, self.name, "cross_entropy, or data of features"))
        if self.bound == "crown-ibp" and parallel.pp > 1:
            message = f"a backward pass over bounds does not cross the stages of a pipeline, pp={parallel.pp}"
            reasons.append(("objective.bound", message, self.bound, "ibp, or parallel.pp of 1"))
        return reasons


def _named(value: Any) -> Any:
    """A bare name stands for the objective of that name with nothing to set."""
    return {"name": value} if isinstance(value, str) else value


OBJECTIVES = catalogue(
    ObjectiveKind,
    (
        ObjectiveKind(CrossEntropy, "service.training.objective:cross_entropy"),
        ObjectiveKind(Certified, "service.training.certified:certified"),
    ),
)

if TYPE_CHECKING:
    ObjectiveSpec = ObjectiveConfig
else:
    ObjectiveSpec = Annotated[
        OBJECTIVES.union(),
        Field(discriminator=OBJECTIVES.tag),
        BeforeValidator(OBJECTIVES.refuse_unavailable),
        BeforeValidator(_named),
    ]
