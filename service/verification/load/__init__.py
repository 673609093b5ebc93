"""Loads a verification job by its source: a trained job's model, an ONNX file, or an archive of instances.

Each source reads the model and its property, checks that they fit each other, and prepares the model for bounding;
:mod:`.task_loader` is common to all of them.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from service.bounds.graph import UnsupportedModelError
from service.bounds.memory import is_out_of_memory
from service.bounds.stages import StageLink
from service.formats.vnnlib import Bundle, Pair, VnnlibError, bundle
from service.jobs.files import DataLayout
from service.jobs.runtime import RefusedError, RunContext
from service.jobs.spec.verify import FromOnnx, InstancesProperty, VerifySpec, VnnlibProperty
from service.parallel.mesh import build as build_mesh
from service.verification.load.model_file import OnnxSource, chosen_source, load_onnx, with_labels_if_asked
from service.verification.load.task_loader import LoadedTasks, TaskLoader
from service.verification.load.trace_cache import TraceCache
from service.verification.properties import Property, PropertyError, read
from service.verification.properties.queried import Queried, check_sizes, paired
from service.verification.task import RefusedModel, Task

__all__ = ["LoadedTasks", "bring_runtime", "load_tasks"]


def bring_runtime(spec: VerifySpec) -> None:
    """Import onnxruntime if needed, while a thread may start the device; its errors are raised where it is used."""
    if isinstance(spec.model, FromOnnx) or isinstance(spec.property, InstancesProperty):
        with suppress(ImportError):
            importlib.import_module("onnxruntime")


def load_tasks(spec: VerifySpec, context: RunContext, device: torch.device) -> LoadedTasks:
    """Return a task for each model of the job; among several, models that cannot be bounded are listed separately.

    So is a model that is too large for this rank's memory, or that the service fails to load, if no other rank waits
    for it. Raises
    :class:`~service.bounds.graph.UnsupportedModelError` or ``PropertyError`` when no model or the property can be done.
    """
    mesh = build_mesh(spec.parallel, context.device_type)
    loader = TaskLoader(
        spec, mesh, device, StageLink(mesh, device), report=context.report, traces=TraceCache(context.host_cache)
    )
    if isinstance(spec.property, InstancesProperty):
        return loader.collected(list(_load_instances(spec.property.instances, context.data, loader)))
    if isinstance(spec.model, FromOnnx):
        property_spec = spec.property
        source = chosen_source(spec.model, context.data)

        @cache  # a large property is read once, although it may decide what the model's outputs are
        def asked(sizes: tuple[int, int]) -> Property:
            return read(property_spec, *sizes, context.data)

        if isinstance(property_spec, VnnlibProperty):
            source = with_labels_if_asked(source, asked)
        loaded = load_onnx(source, loader, asked)
    else:
        from service.verification.load.trained import load_trained  # noqa: PLC0415 - brings every family of models

        loaded = load_trained(context.data, loader)
    return loader.collected([loaded])


def _load_instances(file: str, data: DataLayout, loader: TaskLoader) -> Iterator[Task | RefusedModel]:
    """Yield, for each model of the archive, a task with its instances, or the reason why there is none.

    On a mesh an unsupported model raises, since every rank would have to skip it.
    """
    archive = data.file(file)
    try:
        with bundle(archive) as opened:
            asked, parts = paired(opened), defaultdict[str, list[int]](list)
            for instance, pair in enumerate(opened.pairs):
                parts[pair.model].append(instance)
            for name, part in parts.items():
                read = partial(_content, archive, opened.pairs[part[0]])
                source = OnnxSource(data.cache, f"{file}:{name}", read)
                yield _load_model(name, source, loader, opened=opened, asked=asked, part=part)
    except (OSError, VnnlibError) as error:
        raise PropertyError(f"property.instances: {error}") from error


def _load_model(
    name: str, source: OnnxSource, loader: TaskLoader, *, opened: Bundle, asked: Queried, part: Sequence[int]
) -> Task | RefusedModel:
    """Load one model of several for its part of the instances."""
    checked = partial(_check_fit, opened, asked, part)
    try:
        loaded = load_onnx(with_labels_if_asked(source, checked), loader, checked, part)
    except UnsupportedModelError as error:
        if not loader.is_alone:
            raise UnsupportedModelError(f"{name}: {error}") from error
        return RefusedModel(frozenset(part), f"{name}: {error}")
    except Exception as error:
        if not loader.is_alone or isinstance(error, RefusedError | OSError) or is_out_of_memory(error):
            raise
        return RefusedModel(frozenset(part), f"{name}: {type(error).__name__}: {error}", fault=error)
    return _name_layers(loaded, name, asked, part)


def _name_layers(loaded: Task | RefusedModel, name: str, asked: Queried, part: Sequence[int]) -> Task | RefusedModel:
    """Return a loaded model as one of several: with its own instances, and layers under its name."""
    if isinstance(loaded, RefusedModel):
        return RefusedModel(frozenset(part), f"{name}: {loaded.reason}", asked)
    layers = [replace(layer, name=f"{name}: {layer.name}") for layer in loaded.layers]
    return replace(loaded, layers=layers, part=frozenset(part))


def _content(archive: Path, pair: Pair) -> bytes:
    """Read the ONNX file of a pair."""
    with bundle(archive) as opened:
        content = opened.model(pair)
    if content is None:
        raise PropertyError(f"property.instances: {pair.model} is larger than an ONNX file can be")
    return content


def _check_fit(opened: Bundle, asked: Queried, part: Sequence[int], sizes: tuple[int, int]) -> Queried:
    """Return the queries after checking that each fits its model's sizes."""
    for instance in part:
        check_sizes(opened.pairs[instance].name, asked.queries[instance], sizes)
    return asked
