"""Models from ONNX files, whole on this rank or divided over ranks that map one folder of weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from service.bounds.capture import capture
from service.bounds.evaluated import Evaluated
from service.bounds.exchange import Exchange
from service.bounds.network import from_graph, prepare
from service.bounds.shard import shard
from service.bounds.stages import divide_into_stages
from service.models.build_once import build_once
from service.verification.first_rank_runtime import FirstRankRuntime
from service.verification.load.placement import Placement
from service.verification.properties import Property
from service.verification.task import Refused, Task

PropertyOfSizes = Callable[[tuple[int, int]], Property]
"""Reads the property for a model with that many inputs and outputs, and raises ``PropertyError`` if it does not fit."""


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX file, whose content is read only where it is needed; ``name`` is of this content alone."""

    cache: Path
    name: str
    read: Callable[[], bytes]

    def folder(self, dtype: torch.dtype) -> Path:
        """Return the folder of weights that ranks map, to bound the model in ``dtype``."""
        from service.bounds.onnx.stored import VERSION  # noqa: PLC0415 - brings onnxruntime

        name = hashlib.sha256(f"{self.name} {dtype}".encode()).hexdigest()
        return self.cache / f"onnx-{VERSION}" / name


def load_onnx(source: OnnxSource, placement: Placement, property_of: PropertyOfSizes) -> Task | Refused:
    """Load a model whole, or this rank's share of it where others have the rest."""
    from service.bounds.onnx import load as load_module  # noqa: PLC0415 - brings onnxruntime
    from service.bounds.onnx.reading import Runtime, describe, parse  # noqa: PLC0415

    if not placement.is_alone:
        return _load_divided(source, placement, property_of)
    content = source.read()

    def load() -> Task:
        module = load_module(content)
        asked, runtime = property_of((module.features, module.outputs)), Runtime.of(parse(content))
        module = module.to(placement.device)
        return placement.task(module, prepare(placement.arithmetic.bounded(module), (module.features,)), asked, runtime)

    return placement.unless_too_large(load, lambda: property_of(describe(parse(content)).sizes))


def _load_divided(source: OnnxSource, placement: Placement, property_of: PropertyOfSizes) -> Task:
    """Load this rank's stage and shards alone, on which counterexamples are checked, too."""
    from service.bounds.onnx.model import check  # noqa: PLC0415
    from service.bounds.onnx.reading import Runtime, parse  # noqa: PLC0415
    from service.bounds.onnx.stored import store, stored, type_of  # noqa: PLC0415

    dtype, tp = placement.arithmetic.dtype, placement.mesh.tp
    line, device = placement.line, placement.device
    folder = build_once(source.folder(dtype), lambda path: store(path, source.read(), dtype))
    module = stored(folder, dtype)
    sizes = module.features, module.outputs
    asked = property_of(sizes)
    runtime = FirstRankRuntime(
        lambda: Runtime.of(parse(source.read())), sizes[1], type_of(folder), Exchange(tp), line, device
    )
    notes: list[str] = []
    graph = shard(capture(module, sizes[:1]), tp, notes.append)
    if line is not None:
        staged = divide_into_stages(graph, tp, line)
        task = placement.staged_task(Evaluated(staged.network.graph), staged, asked, runtime)
    else:
        graph = graph.to(device)
        task = placement.task(Evaluated(graph), from_graph(graph, tp), asked, runtime)
    check(lambda x: task.module(x.to(task.like)), sizes[0], replace(runtime))
    return replace(task, notes=tuple(notes))
