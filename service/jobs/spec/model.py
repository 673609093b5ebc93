"""Defines model references: a family with its configuration, the result of a training job, or uploaded weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)

from service.jobs.plugins import ModelConfig
from service.jobs.plugins.declarations import one_of
from service.jobs.spec.common import Dependency, FileId, JobId, Strict
from service.jobs.spec.families import FAMILIES, ConvnetConfig, MlpConfig, TransformerConfig

__all__ = [
    "ConvnetConfig",
    "FamilyConfig",
    "FromHuggingFace",
    "FromJob",
    "FromSafetensors",
    "MlpConfig",
    "ModelConfig",
    "ModelRef",
    "TransformerConfig",
    "jobs_of",
]

if TYPE_CHECKING:
    FamilyConfig = ModelConfig
else:
    FamilyConfig = FAMILIES.choice()


Step = Literal["latest"] | Annotated[int, Field(ge=0)]


class FromJob(Strict):
    """Names a training job's model: the finished one, or the one at a step whose checkpoint is left, also if
    the job failed or was cancelled.
    """

    job: JobId = Field(description="the id of a training job")
    step: Step = Field("latest", description="the step of one of its checkpoints, or latest")


class FromSafetensors(Strict):
    """A family's configuration with weights from an uploaded file: ``{safetensors: FILE, family: …, …}``.

    The file holds whole tensors under the model's own names, as ``model.safetensors`` of a training job does.
    """

    safetensors: FileId = Field(description="the id of an uploaded file of weights")
    config: ModelConfig = Field(description="the family and sizes of the model")

    @classmethod
    def read(cls, value: Any, flat: ValidatorFunctionWrapHandler) -> FromSafetensors:
        """Read the flat form, which a family's configuration and ``safetensors`` share."""
        if isinstance(value, FromSafetensors):
            return value
        given = flat(value)
        family = FAMILIES.provided[given.family].declaration.config
        config = family.model_validate(given.model_dump(by_alias=True, exclude={"safetensors"}))
        return cls(safetensors=given.safetensors, config=config)

    def write(self) -> dict[str, Any]:
        """Write the flat form."""
        return {"safetensors": self.safetensors, **self.config.model_dump(mode="json", by_alias=True)}


def _with_file(config: type[ModelConfig]) -> Any:
    return create_model(
        f"{config.__name__}WithFile",
        __base__=config,
        safetensors=(FileId, Field(description="the id of an uploaded file of weights")),
    )


if TYPE_CHECKING:
    SafetensorsRef = FromSafetensors
else:
    SafetensorsRef = Annotated[
        one_of(tuple(_with_file(each.declaration.config) for each in FAMILIES.provided.values())),
        Field(discriminator=FAMILIES.tag),
        BeforeValidator(FAMILIES.refuse_unavailable),
        WrapValidator(FromSafetensors.read),
        PlainSerializer(FromSafetensors.write),
    ]


class FromHuggingFace(Strict):
    """A Llama-style checkpoint in an uploaded archive: ``config.json`` beside its safetensors files."""

    huggingface: FileId = Field(
        description="the id of an uploaded zip or tar of config.json and its weights, Llama-style"
    )


_FORMS = {"job": FromJob, "safetensors": FromSafetensors, "huggingface": FromHuggingFace, "family": ModelConfig}


def _reference_form(value: Any) -> str | None:
    if isinstance(value, Mapping):
        given = [form for form in _FORMS if form in value]
        return given[0] if len(given) == 1 or given == ["safetensors", "family"] else None
    return next((form for form, kind in _FORMS.items() if isinstance(value, kind)), None)


ModelRef = Annotated[
    Annotated[FamilyConfig, Tag("family")]
    | Annotated[FromJob, Tag("job")]
    | Annotated[SafetensorsRef, Tag("safetensors")]
    | Annotated[FromHuggingFace, Tag("huggingface")],
    Discriminator(
        _reference_form,
        custom_error_type="model_reference",
        custom_error_message="a model is {family: …}, {job: ID}, {safetensors: FILE, family: …} or {huggingface: FILE}",
    ),
]


def jobs_of(model: object, field: str = "model") -> tuple[Dependency, ...]:
    """Return the training job that a model reference in this field names, if it names one."""
    return (Dependency(f"{field}.job", model.job, "train", model.step),) if isinstance(model, FromJob) else ()
