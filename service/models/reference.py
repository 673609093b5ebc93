"""Resolves a model reference into a configuration and initial weights."""

from __future__ import annotations

from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from service.formats.weights import WeightsFileError, names_of, shapes_of
from service.jobs.layout import DataLayout
from service.jobs.spec.model import FromHuggingFace, FromJob, FromSafetensors, ModelConfig, ModelRef
from service.models import huggingface
from service.models.full_weights import Weights, WeightsError, trained


def resolve(reference: ModelRef, data: DataLayout) -> tuple[ModelConfig, Weights | None]:
    """Return the configuration, and weights if the reference has any: mapped, or read when parts of them are taken.

    Raises :class:`WeightsError` when they are not there or cannot be read.
    """
    if isinstance(reference, FromJob):
        return trained(data.job(reference.job), reference.step)
    if isinstance(reference, FromSafetensors):
        held = _read(data, reference.safetensors)
        return reference.config, {own: held[name] for own, name in names_of(reference.config, held).items()}
    if isinstance(reference, FromHuggingFace):
        return huggingface.load(reference.huggingface, data)
    return reference, None


def _read(data: DataLayout, file: str) -> Mapping[str, Tensor]:
    try:
        shapes_of(data.file(file))
        return load_file(data.file(file))
    except WeightsFileError as error:
        raise WeightsError(f"model.safetensors: {file}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"model.safetensors: {file} cannot be read: {error}") from error
