"""Model references: a family with its configuration, what a training job produced, or uploaded weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from service.jobs.plugins import ModelConfig
from service.jobs.spec.base import FileId, JobId, Strict
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
]

if TYPE_CHECKING:
    FamilyConfig = ModelConfig
else:
    FamilyConfig = Annotated[
        FAMILIES.union(), Field(discriminator=FAMILIES.tag), BeforeValidator(FAMILIES.refuse_unavailable)
    ]


class FromJob(Strict):
    """The model that a training job produced."""

    job: JobId
    step: Literal["latest"] | Annotated[int, Field(ge=0)] = "latest"


class FromSafetensors(Strict):
    """A family's configuration with weights from an uploaded file: ``{safetensors: FILE, family: …, …}``.

    The file holds whole tensors under the model's own names, as ``model.safetensors`` of a training job does.
    """

    safetensors: FileId
    config: FamilyConfig

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, value: Any) -> Any:
        """The configuration's fields stand beside ``safetensors``."""
        if not isinstance(value, Mapping) or "config" in value:
            return value
        fields = {name: each for name, each in value.items() if name != "safetensors"}
        return {"safetensors": value.get("safetensors"), "config": fields}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The flat form; which fields stand beside ``safetensors`` depends on the family."""
        schema = handler.resolve_ref_schema(handler(core))
        schema["properties"] = {
            "safetensors": schema["properties"]["safetensors"],
            "family": {"enum": list(FAMILIES.provided)},
        }
        return {**schema, "required": ["safetensors", "family"], "additionalProperties": True}

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {"safetensors": fields["safetensors"], **fields["config"]}


class FromHuggingFace(Strict):
    """A Llama-style checkpoint in an uploaded archive: ``config.json`` beside its safetensors files."""

    huggingface: FileId


_FORMS = {"job": FromJob, "safetensors": FromSafetensors, "huggingface": FromHuggingFace, "family": ModelConfig}


def _reference_form(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return next((form for form in _FORMS if form in value), None)
    return next((form for form, kind in _FORMS.items() if isinstance(value, kind)), None)


ModelRef = Annotated[
    Annotated[FamilyConfig, Tag("family")]
    | Annotated[FromJob, Tag("job")]
    | Annotated[FromSafetensors, Tag("safetensors")]
    | Annotated[FromHuggingFace, Tag("huggingface")],
    Discriminator(
        _reference_form,
        custom_error_type="model_reference",
        custom_error_message="a model is {family: …}, {job: ID}, {safetensors: FILE, family: …} or {huggingface: FILE}",
    ),
]
