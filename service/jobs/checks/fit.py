"""Checks whether a spec fits together: model, data and property, the mesh that divides the model, and the fleet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Literal

from service.jobs.plugins import CheckContext, CommonSpec, DataConfig, Features, ModelConfig, ParallelSpec, Tokens
from service.jobs.records import Problem
from service.jobs.spec.common import LOCAL, launchers, unknown_launcher
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.data import DataSpec, FileArrays
from service.jobs.spec.families.packaged import PackagedConfig
from service.jobs.spec.model import FromHuggingFace, FromJob, TransformerConfig
from service.jobs.spec.train import ExportSpec, TrainSpec
from service.jobs.spec.verify import Box, BoxProperty, Robustness, RobustnessProperty, VerifySpec
from service.schedules import generator
from service.schedules.schedule import ScheduleError
from service.schedules.verify import verify


def check_property(spec: VerifySpec, config: ModelConfig) -> Iterator[Problem]:
    """Yield why the property does not fit this model."""
    reads = config.reads
    if isinstance(reads, Tokens) and _asks_for_tokens(spec, config):
        assert isinstance(spec.property, RobustnessProperty)
        yield from _check_robustness(spec.property.robustness, spec.model, config)
    elif isinstance(reads, Tokens):
        path = f"model.{_form(spec.model)}"
        message = "token ids have no box to certify around them"
        yield Problem(path, message, config.family, "a model that reads features")
    elif isinstance(spec.property, BoxProperty):
        yield from _check_box(spec.property.box, reads)
    elif isinstance(spec.property, RobustnessProperty):
        yield from _check_robustness(spec.property.robustness, spec.model, config)


def _asks_for_tokens(spec: VerifySpec, config: ModelConfig) -> bool:
    """Return whether the property is about embedded tokens, the only box that a model of token ids has."""
    checked_property = spec.property
    about_tokens = isinstance(checked_property, RobustnessProperty) and isinstance(
        checked_property.robustness.data.gives, Tokens
    )
    return about_tokens and isinstance(config, TransformerConfig)


def _form(model: object) -> str:
    """Return the name of the field that names the model."""
    if isinstance(model, FromJob):
        return "job"
    return "huggingface" if isinstance(model, FromHuggingFace) else "family"


def check_export(export: ExportSpec, config: ModelConfig) -> Iterator[Problem]:
    """Yield why the trained model cannot be exported in the spec's form."""
    if export.huggingface is not None and not isinstance(config, TransformerConfig):
        message = f"Hugging Face's libraries have no model like the family {config.family}"
        yield Problem("export.huggingface", message, export.huggingface, "null, or a transformer")


def check_data(data: DataSpec, path: str, model: object, config: ModelConfig) -> Iterator[Problem]:
    """Yield why a model cannot read such data.

    ``model`` is the spec's reference to it, ``config`` the family's configuration behind the reference.
    """
    model_path = None if isinstance(model, FromJob | FromHuggingFace) else "model"
    gives, reads = data.gives, config.reads
    if isinstance(gives, Tokens) and isinstance(reads, Tokens):
        yield from _check_tokens(data.source, path, gives, reads, model_path)
    elif isinstance(gives, Features) and isinstance(reads, Features):
        yield from check_shapes(data, path, gives, reads)
        given = (("features", gives.features), ("classes", gives.classes))
        built = ((reads.features_field, reads.features), (reads.classes_field, reads.classes))
        for (name, size), (field, wanted) in zip(given, built, strict=True):
            message = f"the model has {field or name}={wanted}, the data has {name}={size}"
            if size != wanted and model_path is None:
                yield Problem(path, message, size, str(wanted))
            elif size != wanted:
                yield Problem(f"{model_path}.{field}" if field else str(model_path), message, wanted, str(size))
    else:
        wanted_kind = "tokens" if isinstance(reads, Tokens) else "features"
        message = f"a model of family {config.family} reads {wanted_kind}"
        yield Problem(f"{path}.source", message, data.source, f"a source of {wanted_kind}")


def check_shapes(data: DataConfig, path: str, gives: Features, reads: Features) -> Iterator[Problem]:
    """Yield why a model would take one axis of its inputs for another."""
    if None in (gives.shape, reads.shape) or gives.features != reads.features or reads.holds(gives.shape or ()):
        return
    message = f"the model reads inputs of shape {reads.shape}, the data are of shape {gives.shape}"
    expected = f"data of shape {reads.shape}"
    if isinstance(data, FileArrays):
        orders = permutations(range(len(data.shape)))
        fitting = [list(axes) for axes in orders if reads.holds([data.shape[axis] for axis in axes])]
        expected += f", or {path}.axes={' or '.join(map(str, fitting))}, which moves them" if fitting else ""
    yield Problem(f"{path}.shape" if isinstance(data, FileArrays) else path, message, str(gives.shape), expected)


def _check_tokens(source: str, path: str, gives: Tokens, reads: Tokens, model_path: str | None) -> Iterator[Problem]:
    longest, vocabulary = reads.sequence_field or "the longest sequence", reads.vocabulary_field or "vocabulary"
    if gives.sequence > reads.sequence:
        message = f"sequence={gives.sequence} is longer than the model's {longest}={reads.sequence}"
        yield Problem(f"{path}.sequence", message, gives.sequence, f"at most {reads.sequence}")
    if reads.vocabulary < gives.vocabulary:
        message = f"the data has {gives.vocabulary} tokens, the model has {vocabulary}={reads.vocabulary}"
        where = f"{path}.source" if model_path is None else f"{model_path}.{vocabulary}"
        got = source if model_path is None else reads.vocabulary
        yield Problem(where, message, got, f"{vocabulary} of at least {gives.vocabulary}")


def _check_box(box: Box, reads: Features) -> Iterator[Problem]:
    if len(box.lower) != reads.features:
        inputs = reads.features_field or "features"
        message = f"the box has {len(box.lower)} dimensions, the model has {inputs}={reads.features}"
        yield Problem("property.box.lower", message, len(box.lower), f"{reads.features} numbers")
    for index, halfspace in enumerate(box.output):
        if (length := len(halfspace.coefficients)) != reads.classes:
            message = f"{length} coefficients for {reads.classes_field or 'classes'}={reads.classes}"
            path = f"property.box.output.{index}.coefficients"
            yield Problem(path, message, length, f"{reads.classes} numbers")


def _check_robustness(robustness: Robustness, model: object, config: ModelConfig) -> Iterator[Problem]:
    yield from check_data(robustness.data, "property.robustness.data", model, config)
    yield from check_count(robustness)


def check_count(robustness: Robustness) -> Iterator[Problem]:
    """Yield why there are not so many samples."""
    data = robustness.data
    if data.held_out is not None and robustness.count > data.held_out:
        message = f"the test split of {data.source} has {data.held_out} samples"
        yield Problem("property.robustness.count", message, robustness.count, f"at most {data.held_out}")


def check_mesh(parallel: ParallelSpec, stages: int, model: object, config: ModelConfig) -> Iterator[Problem]:
    """Yield why a model cannot be cut into ``stages`` over the ranks.

    ``model`` is the spec's reference to it, ``config`` the family's configuration behind the reference.
    """
    for path, message, got, expected in config.check_parallel(parallel, stages):
        if not isinstance(model, FromJob):
            yield Problem(path, message, got, expected)
        elif path.startswith("parallel."):
            yield Problem(path, f"job {model.job}: {message}", got, expected)
        else:
            yield Problem("parallel.tp", f"job {model.job}, {path}: {message}", parallel.tp, f"a divisor of {got}")


def check_package(config: ModelConfig, model: object, context: CheckContext) -> Iterator[Problem]:
    """Yield why no known host could build a model that a package has by name."""
    known = context.fleet_packages
    if isinstance(config, PackagedConfig) and known is not None and config.package not in known:
        message = f"no worker host has the package {config.package}"
        expected = f"{config.package} on a host (Trivet's extra `families`), or another family"
        yield Problem(f"model.{_form(model)}", message, config.family, expected)


LARGEST = 2**14
"""Most stages × micro-batches: a client waits while the schedule is proved."""


def check_pipeline(spec: TrainSpec | CompileSpec, micro_batches: int) -> Iterator[Problem]:
    """Yield why the ranks' schedule cannot be written, or proved complete and free of deadlock."""
    if spec.parallel.pp == 1:
        return
    if spec.sharding.reduce == "every":
        message = f"the schedule of pp={spec.parallel.pp} places the reductions"
        yield Problem("sharding.reduce", message, "every", "last, or a mesh without a pipeline")
    stages, pipeline = spec.stages, spec.pipeline
    if stages * micro_batches > LARGEST:
        message = f"{stages} stages × {micro_batches} micro-batches = {stages * micro_batches} forwards in a step"
        yield Problem("pipeline.micro_batches", message, micro_batches, f"at most {LARGEST // stages}")
        return
    numbers = f"pp={spec.parallel.pp}, {pipeline.stages_per_rank} stages per rank, {micro_batches} micro-batches"
    try:
        verify(generator(pipeline.schedule)(spec.parallel.pp, pipeline.stages_per_rank, micro_batches))
    except ScheduleError as error:
        yield Problem("pipeline.schedule", f"{numbers}: {error}", pipeline.schedule, "another schedule")
    except ValueError as error:
        yield Problem("pipeline.micro_batches", f"{numbers}: {error}", micro_batches, "numbers that it accepts")


def pool_of(spec: CommonSpec, context: CheckContext) -> Literal["cuda", "cpu"]:
    """Return the pool in which the ranks would run now: the spec's, or the one that placement chooses for ``auto``."""
    return context.auto_pool if spec.device == "auto" else spec.device


def check_float8(spec: TrainSpec | CompileSpec, config: ModelConfig | None, context: CheckContext) -> Iterator[Problem]:
    """Yield why the model or the fleet cannot compute in float8, if the job asks for that."""
    if not spec.precision.float8:
        return
    if config is not None and not config.takes_float8:
        message = f"float8 is for linear layers of Trivet's, and this {config.family} has none in its blocks"
        yield Problem("precision.float8", message, True, "false")
    elif context.fleet_capacity is not None and pool_of(spec, context) == "cpu":
        message = "float8 layers need CUDA devices of sm_89 or later, and this job would run on cpu"
        yield Problem("precision.float8", message, True, "false")


def check_fleet(spec: CommonSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield why the known hosts could never hold the job's ranks. Drained hosts count: they may be resumed, and
    ``auto`` may then mean CUDA.
    """
    fleet_capacity = context.fleet_capacity
    if spec.launcher is not None and spec.launcher != LOCAL:
        if spec.launcher not in (known := launchers()):
            yield Problem("launcher", unknown_launcher(spec.launcher), spec.launcher, ", ".join([LOCAL, *known]))
        return
    if fleet_capacity is None:
        return
    pool = pool_of(spec, context)
    if spec.device == "auto" and fleet_capacity.get("cuda", 0) > fleet_capacity.get(pool, 0):
        pool = "cuda"
    available = fleet_capacity.get(pool, 0)
    if available == 0:
        others = ", ".join(name for name, count in fleet_capacity.items() if count) or "none"
        yield Problem("device", f"the fleet has no {pool} devices", spec.device, f"a device that it has: {others}")
    elif spec.parallel.world_size > available:
        message = f"{spec.parallel.arithmetic} ranks, but the fleet has {available} {pool} devices"
        yield Problem("parallel", message, spec.parallel.world_size, f"at most {available} ranks")
