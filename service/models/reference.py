"""Resolves a model reference into a configuration and initial weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from service.formats.archive import ArchiveError, is_archive
from service.formats.weights import WeightsFileError, check_foreign, names_of, shapes_of
from service.jobs.files import WEIGHTS, Checkpoint, DataLayout, JobPaths, finished
from service.jobs.spec.families.packaged import PackagedConfig
from service.jobs.spec.model import FamilyConfig, FromHuggingFace, FromJob, FromSafetensors, ModelConfig, ModelRef
from service.models import huggingface
from service.models.full_weights import Weights, WeightsError
from service.models.outline import ModelOutline
from service.models.plain import PLAIN
from service.models.registry import outline

_CHECKPOINT_PREFIX = "model."
_config: TypeAdapter[ModelConfig] = TypeAdapter(FamilyConfig)


def resolve(reference: ModelRef, data: DataLayout) -> tuple[ModelConfig, Weights | None]:
    """Return the configuration, and weights by the model's names if the reference has any: mapped, or read when parts
    of them are taken.

    Raises :class:`WeightsError` when they are not there, have changed since they were written, cannot be read, or are
    another model's.
    """
    config, held = read(reference, data)
    return config, fit(held, outline(config)) if isinstance(held, UploadedWeights) else held


def read(reference: ModelRef, data: DataLayout) -> tuple[ModelConfig, HeldWeights]:
    """Return the configuration, and the weights as they are held, which may yet have to :func:`fit` the model.

    Raises :class:`WeightsError` when they are not there, have changed since they were written, or cannot be read.
    """
    check_whole(reference, data)
    return read_unchecked(reference, data)


def check_whole(reference: ModelRef, data: DataLayout) -> None:
    """Raise :class:`WeightsError` for weights of a job that are not there, or have changed since they were written; it
    takes about a second for a GB.
    """
    if isinstance(reference, FromJob):
        _find(data.job(reference.job), reference.step).check()


def read_unchecked(reference: ModelRef, data: DataLayout) -> tuple[ModelConfig, HeldWeights]:
    """Read a reference whose weights another process checks (:func:`check_whole`)."""
    if isinstance(reference, FromJob):
        found = _find(data.job(reference.job), reference.step)
        return found.config(), found.read()
    if isinstance(reference, FromSafetensors):
        return reference.config, _uploaded(data, reference.safetensors, reference.config)
    if isinstance(reference, FromHuggingFace):
        return huggingface.load(reference.huggingface, data)
    return reference, None


@dataclass(frozen=True)
class UploadedWeights:
    """The tensors of an uploaded file, by the file's own names."""

    file: str
    tensors: Mapping[str, Tensor]


HeldWeights = Weights | UploadedWeights | None


def fit(held: HeldWeights, model: ModelOutline) -> Weights | None:
    """Return weights by the names of the model. Raises :class:`WeightsError` for those of another."""
    if not isinstance(held, UploadedWeights):
        return held
    with _naming(held.file):
        names = names_of(model.config, held.tensors)
        if model.is_plain:
            names = {PLAIN + own.removeprefix(PLAIN): name for own, name in names.items()}
        weights = {own: held.tensors[name] for own, name in names.items()}
        repeated = {own: other for own, other in model.elsewhere.items() if own in names}
        for own, other in repeated.items():
            if other in names and not torch.equal(weights[own], weights[other]):
                raise WeightsFileError(f"{own!r} differs from {other!r}, which are one parameter in this model")
        check_foreign(names, {*model.parameters, *model.buffers, *repeated})
    return weights


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Raise :class:`WeightsError` with the name of an uploaded file that cannot be read, or has no such weights."""
    try:
        yield
    except WeightsFileError as error:
        raise WeightsError(f"model.safetensors: {file}: {error}") from error
    except (OSError, SafetensorError, ArchiveError) as error:
        raise WeightsError(f"model.safetensors: {file} cannot be read: {error}") from error


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


def _uploaded(data: DataLayout, file: str, config: ModelConfig) -> UploadedWeights:
    with _naming(file):
        if isinstance(config, PackagedConfig) and is_archive(data.file(file)):
            return UploadedWeights(file, huggingface.tensors_of(file, data))
        shapes_of(data.file(file))
        return UploadedWeights(file, load_file(data.file(file)))
