"""Resolves a model reference into a configuration and initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from service.formats.archive import ArchiveError, is_archive
from service.formats.weights import WeightsFileError, check_foreign, names_of, shapes_of
from service.jobs.files import WEIGHTS, Checkpoint, DataLayout, JobPaths, finished
from service.jobs.spec.families.packaged import PackagedConfig
from service.jobs.spec.model import FamilyConfig, FromHuggingFace, FromJob, FromSafetensors, ModelConfig, ModelRef
from service.models import huggingface
from service.models.full_weights import Weights, WeightsError
from service.models.plain import PLAIN, PlainModel
from service.models.registry import build
from service.parallel.tensor.placement import global_tensors

_CHECKPOINT_PREFIX = "model."
_config: TypeAdapter[ModelConfig] = TypeAdapter(FamilyConfig)


def resolve(reference: ModelRef, data: DataLayout) -> tuple[ModelConfig, Weights | None]:
    """Return the configuration, and weights if the reference has any: mapped, or read when parts of them are taken.

    Raises :class:`WeightsError` when they are not there, have changed since they were written, or cannot be read.
    """
    check_whole(reference, data)
    return resolve_unchecked(reference, data)


def check_whole(reference: ModelRef, data: DataLayout) -> None:
    """Raise :class:`WeightsError` for weights of a job that are not there, or have changed since they were written; it
    takes about a second for a GB.
    """
    if isinstance(reference, FromJob):
        _find(data.job(reference.job), reference.step).check()


def resolve_unchecked(reference: ModelRef, data: DataLayout) -> tuple[ModelConfig, Weights | None]:
    """Resolve a reference whose weights another process checks (:func:`check_whole`)."""
    if isinstance(reference, FromJob):
        found = _find(data.job(reference.job), reference.step)
        return found.config(), found.read()
    if isinstance(reference, FromSafetensors):
        return reference.config, _read(data, reference.safetensors, reference.config)
    if isinstance(reference, FromHuggingFace):
        return huggingface.load(reference.huggingface, data)
    return reference, None


def trained(paths: JobPaths, step: int | Literal["latest"] = "latest") -> tuple[ModelConfig, Weights]:
    """Return the configuration and weights that a training job left, in any layout; parts of them are read when
    taken.

    ``latest`` is the finished model, or the newest checkpoint of a job that has not finished one. Raises
    :class:`WeightsError` naming the steps that there are, or the file that has changed.
    """
    found = _find(paths, step)
    found.check()
    return found.config(), found.read()


@dataclass(frozen=True)
class _Finished:
    """The finished model of a training job."""

    paths: JobPaths
    model: Mapping[str, Any]
    """Its description."""

    def check(self) -> None:
        from service.parallel import checkpoint  # noqa: PLC0415 - it takes long to import, and few jobs read checkpoints

        if checkpoint.first_damaged(
            self.paths.artifacts, {WEIGHTS: self.model["sha256"]} if "sha256" in self.model else {}
        ):
            raise _damaged(self.paths, WEIGHTS)

    def config(self) -> ModelConfig:
        return _config.validate_python(self.model["config"])

    def read(self) -> Weights:
        held, prefix = load_file(self.paths.artifacts / WEIGHTS), self.model.get("prefix", "")
        return {prefix + name: tensor for name, tensor in held.items()}


@dataclass(frozen=True)
class _Saved:
    """A checkpoint of a training job."""

    paths: JobPaths
    checkpoint: Checkpoint

    def check(self) -> None:
        from service.parallel import checkpoint  # noqa: PLC0415

        if (damaged := checkpoint.damage(self.checkpoint)) is not None:
            raise _damaged(self.paths, f"{self.checkpoint.path.name}/{damaged}")

    def config(self) -> ModelConfig:
        return _config.validate_python(self.checkpoint.meta["model"])

    def read(self) -> Weights:
        from service.parallel import checkpoint  # noqa: PLC0415

        return checkpoint.stored(self.checkpoint.path, _CHECKPOINT_PREFIX)


def _find(paths: JobPaths, step: int | Literal["latest"]) -> _Finished | _Saved:
    from service.parallel import checkpoint  # noqa: PLC0415

    model = finished(paths.artifacts)
    if model is not None and step in ("latest", model["step"]):
        return _Finished(paths, model)
    saved = {each.step: each for each in checkpoint.complete(paths.checkpoints)}
    wanted = max(saved, default=None) if step == "latest" else step
    if wanted not in saved:
        steps = sorted({*saved, *([model["step"]] if model else [])})
        raise WeightsError(f"{paths.root.name} has no weights of step {step!r}; there are {steps or 'none'}")
    return _Saved(paths, saved[wanted])


def _damaged(paths: JobPaths, file: str) -> WeightsError:
    from service.parallel import checkpoint  # noqa: PLC0415

    steps = ", ".join(str(each.step) for each in checkpoint.complete(paths.checkpoints)) or "none"
    return WeightsError(
        f"{paths.root.name}: {file} has changed since it was written; choose the weights of another step (checkpoints: "
        f"{steps})"
    )


def _read(data: DataLayout, file: str, config: ModelConfig) -> Mapping[str, Tensor]:
    try:
        if isinstance(config, PackagedConfig) and is_archive(data.file(file)):
            held = huggingface.tensors_of(file, data)
        else:
            shapes_of(data.file(file))
            held = load_file(data.file(file))
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
