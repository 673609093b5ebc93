"""Resolves a model reference into a configuration and initial weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from service.formats.archive import ArchiveError
from service.formats.weights import WeightsFileError, check_foreign, in_archive, names_of, shapes_of
from service.jobs.files import DataLayout
from service.jobs.spec.model import FromHuggingFace, FromJob, FromSafetensors, ModelConfig, ModelRef
from service.models import huggingface
from service.models.full_weights import Weights, WeightsError, trained
from service.models.plain import PLAIN, PlainModel
from service.models.registry import build
from service.parallel.tensor.placement import global_tensors


def resolve(reference: ModelRef, data: DataLayout) -> tuple[ModelConfig, Weights | None]:
    """Return the configuration, and weights if the reference has any: mapped, or read when parts of them are taken.

    Raises :class:`WeightsError` when they are not there or cannot be read.
    """
    if isinstance(reference, FromJob):
        return trained(data.job(reference.job), reference.step)
    if isinstance(reference, FromSafetensors):
        return reference.config, _read(data, reference.safetensors, reference.config)
    if isinstance(reference, FromHuggingFace):
        return huggingface.load(reference.huggingface, data)
    return reference, None


def _read(data: DataLayout, file: str, config: ModelConfig) -> Mapping[str, Tensor]:
    try:
        if in_archive(path := data.file(file), config):
            held = huggingface.tensors_of(file, data)
        else:
            shapes_of(path)
            held = load_file(path)
        model = build(config, device="meta")
        names = names_of(config, held)
        if isinstance(model, PlainModel):
            names = {PLAIN + own.removeprefix(PLAIN): name for own, name in names.items()}
        weights = {own: held[name] for own, name in names.items()}
        check_foreign(names, _parameters(model, weights))
    except WeightsFileError as error:
        raise WeightsError(f"model.safetensors: {file}: {error}") from error
    except (OSError, SafetensorError, ArchiveError) as error:
        raise WeightsError(f"model.safetensors: {file} cannot be read: {error}") from error
    return weights


def _parameters(model: nn.Module, weights: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the model's parameters and buffers, and those of their other places that the weights repeat.

    Raises :class:`WeightsFileError` for weights that differ where the model has one parameter for both.
    """
    own = dict(global_tensors(model))
    first = {id(parameter): name for name, parameter in own.items()}
    repeated = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in own and name in weights
    }
    for name, other in repeated.items():
        if other in weights and not torch.equal(weights[name], weights[other]):
            raise WeightsFileError(f"{name!r} differs from {other!r}, which are one parameter in this model")
    return own.keys() | repeated.keys()
