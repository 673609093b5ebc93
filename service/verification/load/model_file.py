"""Loads models from ONNX files, whole or divided over ranks, and picks inputs at which onnxruntime must agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from service.bounds.capture import capture
from service.bounds.graph import Graph, UnsupportedModelError
from service.bounds.graph_module import ExecutableGraph
from service.bounds.rank_group import RankGroup
from service.bounds.shard import shard
from service.bounds.stages import StageLink
from service.jobs.files import DataLayout
from service.jobs.spec.verify import FromOnnx
from service.parallel.distributed import build_once
from service.verification.load.task_loader import TaskLoader
from service.verification.properties import Property, PropertyError
from service.verification.task import Outside, RefusedModel, Task

if TYPE_CHECKING:
    from service.bounds.onnx.model import OnnxModel, Running, RunsInstances
    from service.bounds.operators.conversion import Array


PropertyOfSizes = Callable[[tuple[int, int]], Property]
"""Reads the property for a model with that many inputs and outputs, and raises ``PropertyError`` if it does not fit."""


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX file, whose content is read only when needed. ``name`` depends on the content alone; ``size`` is the
    file's bytes, compressed or not.
    """

    cache: Path
    name: str
    read: Callable[[], bytes]
    size: int = 0

    def folder(self, dtype: torch.dtype | None) -> Path:
        """Return the folder of weights that ranks map, to bound the model in ``dtype``; without, of its own type."""
        from service.bounds.onnx.stored import VERSION  # noqa: PLC0415 - brings onnx

        name = hashlib.sha256(f"{self.name} {dtype}".encode()).hexdigest()
        return self.cache / f"onnx-{VERSION}" / name


def chosen_source(model: FromOnnx, data: DataLayout) -> OnnxSource:
    """Return the file of a spec, with the inputs and outputs that the spec chooses."""
    path, choices = data.file(model.onnx), model.choices()

    def read() -> bytes:
        from service.formats.onnx import OnnxError, chosen  # noqa: PLC0415 - brings onnx

        try:
            return chosen(path.read_bytes(), model)
        except OnnxError as error:
            raise UnsupportedModelError(str(error)) from error

    name = f"{model.onnx} {json.dumps(choices)}" if choices else model.onnx
    return OnnxSource(data.cache, name, read, path.stat().st_size if path.is_file() else 0)


def with_labels_if_asked(source: OnnxSource, property_of: PropertyOfSizes) -> OnnxSource:
    """Return the source with the labels of the file among its outputs, where the property is about as many as that.

    Labels beside scores are else left out. All ranks get the same result. Raises :class:`UnsupportedModelError` if the
    property may as well be about the file's first output, which is left out.
    """
    from service.bounds.onnx.reading import describe, parse  # noqa: PLC0415 - brings onnx
    from service.formats.onnx import LARGEST_READ, OnnxError, outline_of, unpacked, with_labels  # noqa: PLC0415 - brings onnx

    if source.size > LARGEST_READ:
        return source
    content = source.read()
    try:
        found = outline_of(unpacked(content, LARGEST_READ))
    except OnnxError:  # the loader reports it
        return source
    sizes = 0, 0
    try:
        if found.has_labels or found.rival:
            sizes = describe(parse(content)).sizes
            property_of(sizes)
    except PropertyError:
        if not found.has_labels:
            raise
        return replace(source, name=f"{source.name} with labels", read=lambda: with_labels(source.read()))
    if found.is_unclear(sizes[1]):
        raise UnsupportedModelError(f"{found.why_unclear}; expected {found.to_be_clear}")
    return source


def load_onnx(
    source: OnnxSource, loader: TaskLoader, property_of: PropertyOfSizes, part: Sequence[int] | None = None
) -> Task | RefusedModel:
    """Load a model whole, or this rank's share of it where others have the rest.

    ``part`` has the instances about it, if the property has instances about other models.
    """
    from service.bounds.onnx.model import check_at, load_both  # noqa: PLC0415 - brings onnx
    from service.bounds.onnx.reading import describe, parse  # noqa: PLC0415

    if not loader.is_alone:
        return _load_divided(source, loader, property_of, part)
    content = source.read()

    def load() -> Task:
        module, runtime = load_both(content)
        typed = replace(loader, dtype=module.get_buffer("type_of_all").dtype)
        asked = property_of((module.features, module.outputs))
        module = module.to(loader.device)
        bounded = typed.arithmetic.module_to_bound(module)
        engine = typed.engine_of_content(bounded, (module.features,), source.name)
        task = typed.task(module, engine, asked, runtime)
        inputs = _points(asked, part, runtime, loader, engine.network.graph)
        difference = check_at(module, inputs, runtime, module.remedy)
        outside = Outside(_own(source, module, runtime.precision, lambda: runtime).flat, source.read)
        return replace(task, precision=_note_precision(runtime, difference, len(inputs)), outside=outside)

    return loader.unless_too_large(load, lambda: property_of(describe(parse(content)).sizes))


def _load_divided(
    source: OnnxSource, loader: TaskLoader, property_of: PropertyOfSizes, part: Sequence[int] | None
) -> Task:
    """Load only this rank's stage and shards; counterexamples are checked on them too."""
    from service.bounds.onnx.model import check, check_at  # noqa: PLC0415
    from service.bounds.onnx.reading import Runtime, parse  # noqa: PLC0415
    from service.bounds.onnx.stored import store, store_type, stored, stored_precision, type_of  # noqa: PLC0415

    about = build_once(source.folder(None), lambda path: store_type(path, source.read()))
    own = type_of(about)
    loader = replace(loader, dtype=torch.float64 if own == np.float64 else torch.float32)
    dtype, tp = loader.arithmetic.dtype, loader.mesh.tp
    folder = build_once(source.folder(dtype), lambda path: store(path, source.read(), dtype))
    module = stored(folder, dtype)
    sizes = module.features, module.outputs
    asked = property_of(sizes)
    runtime = _FirstRankRuntime(
        lambda: Runtime.of(parse(source.read())),
        sizes[1],
        own,
        RankGroup(tp),
        loader.line,
        loader.device,
        stored_precision(about),
    )
    there = replace(runtime, load=partial(_own, source, module, runtime.precision, runtime.load))
    notes: list[str] = []
    engine = loader.engine_of_graph(shard(capture(module, sizes[:1]), tp, notes.append))
    task = loader.task(ExecutableGraph(engine.network.graph), engine, asked, runtime)

    def run(x: Tensor) -> Tensor:
        return engine.network.tp_group.agree(task.module(x.to(task.like)))

    check(run, sizes[0], replace(runtime), remedy=module.remedy)
    inputs = _points(asked, part, runtime, loader)
    told = _note_precision(runtime, check_at(run, inputs, replace(runtime), module.remedy), len(inputs))
    return replace(task, notes=tuple(notes), precision=told, outside=Outside(there.flat, source.read))


def _own(
    source: OnnxSource, module: OnnxModel, precision: str | None, otherwise: Callable[[], RunsInstances]
) -> RunsInstances:
    """Return the user's file as it is; in bfloat16 onnxruntime runs none on a CPU, and has the model as it was read."""
    from service.bounds.onnx.own_file import OwnFile  # noqa: PLC0415 - brings onnx

    return otherwise() if "bfloat16" in (precision or "") else OwnFile(source.read, module.output_names)


def _note_precision(runtime: Running, difference: float, inputs: int) -> str | None:
    """Return the note on the bounds in rows of a model in half precision."""
    if runtime.precision is None:
        return None
    if "bfloat16" in runtime.precision:
        added = "what rounding to 8 bits after each operator adds is not in them"
    else:
        added = f"onnxruntime's rounding adds to them, {difference:.2g} at the most of {inputs} inputs"
    return f"{runtime.precision}: bounds are of the model's function of real numbers; {added}"


def _points(
    asked: Property, part: Sequence[int] | None, runtime: Running, loader: TaskLoader, graph: Graph | None = None
) -> Tensor:
    """Return inputs of the property that are numbers of the model's own type, in its present type."""
    own = torch.from_numpy(np.empty(0, runtime.dtype))
    if graph is None or not is_small(
        graph
    ):  # for a small model, a GPU spends longer loading kernels than a CPU needs in all
        own = own.to(loader.device)
    found = points(asked, range(asked.count) if part is None else part, own, graph)
    found = found[found.isfinite().all(dim=1)].to(loader.device)
    return found if found.dtype == torch.float64 else found.float()


def is_small(graph: Graph) -> bool:
    """Return whether a CPU can try all candidates in some hundredths of a second."""
    constants = sum(each.numel() for each in ExecutableGraph(graph).buffers())
    return sum(node.size for node in graph.nodes) <= MOST_NUMBERS // CANDIDATES and constants <= MOST_CONSTANTS


@dataclass(eq=False)
class _FirstRankRuntime:
    """A model in onnxruntime that only the first rank loads, when it is first run: it takes the whole model.

    ``outputs`` counts the model's; ``dtype`` is its input's, ``precision`` the half one within it. All ranks call it
    with the same instance.
    """

    load: Callable[[], RunsInstances]
    outputs: int
    dtype: type[np.floating[Any]]
    tp_group: RankGroup
    line: StageLink
    device: torch.device
    precision: str | None = None

    def flat(self, instance: Array) -> Array:
        found = torch.zeros(self.outputs, dtype=torch.float64, device=self.device)
        if self.tp_group.axis.rank == 0 and self.line.is_first:
            found = torch.from_numpy(self._session.flat(instance)).to(self.device)
        return np.asarray(self.line.of_first(self.tp_group.agree(found)).cpu())

    @cached_property
    def _session(self) -> RunsInstances:
        return self.load()


BOXES, EACH = 4, 6
"""The number of a property's boxes from which points are drawn, and the points of each."""
CANDIDATES, MOST_NUMBERS, CHOSEN = 256, 2**22, 12
"""The number of points that are tried for new pieces, the numbers at once, and the number of points that are kept."""
MOST_CONSTANTS = 2**16
"""The numbers in the constants of a graph that counts as small."""


@torch.no_grad()
def points(asked: Property, instances: Sequence[int], like: Tensor, graph: Graph | None = None) -> Tensor:
    """Return inputs ``(n, features)`` in the dtype and on the device of ``like``: centres, corners and others.

    They lie in the boxes of ``instances``, which are about the model. Given its whole ``graph``, more are added that
    reach as many of its pieces as possible. All ranks draw the same.
    """
    instances = instances[:: max(1, len(instances) // BOXES)][:BOXES]
    boxes = [asked.batch([instance], like).box for instance in instances]
    generator = torch.Generator().manual_seed(0)
    drawn = [within(each.lower, each.upper, EACH, generator) for each in boxes]
    if graph is not None:
        count = min(CANDIDATES, MOST_NUMBERS // sum(node.size for node in graph.nodes)) // len(boxes)
        candidates = torch.cat([within(each.lower, each.upper, max(EACH, count), generator) for each in boxes])
        drawn.append(candidates[_covering(graph, candidates)])
    return torch.cat(drawn)


def within(lower: Tensor, upper: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` points of a box ``(1, features)``: its centre, its two ends, corners, and points between."""
    shares = torch.rand(count, lower.shape[1], generator=generator, dtype=torch.float64)
    shares[3 : 3 + count // 3].round_()
    for index, share in enumerate((0.5, 0.0, 1.0)):
        shares[index] = share
    shares = shares.to(lower)
    return torch.minimum(torch.maximum(lower * (1 - shares) + upper * shares, lower), upper)


def _covering(graph: Graph, candidates: Tensor) -> list[int]:
    """Choose points one by one, each the point that reaches the most new pieces."""
    taken = _pieces(graph, candidates)
    chosen = list[int]()
    for _ in range(min(CHOSEN, len(candidates))):
        fresh = taken.sum(dim=1)
        best = int(fresh.argmax())
        if not fresh[best]:
            break
        chosen.append(best)
        taken = taken & ~taken[best]
    return chosen


def _pieces(graph: Graph, x: Tensor) -> Tensor:
    """Return statements about values at points, bool ``(points, statements)``: their signs, and which operands they
    equal. They distinguish the pieces of activations and of extremes, whatever the operator.
    """
    statements = list[Tensor]()
    by_name, values = graph.by_name, dict[str, Tensor]()
    x = x.double()
    for name, value in ExecutableGraph(graph).to(x.device, x.dtype).steps(x.reshape(-1, *graph.input.shape)):
        values[name] = value
        positive = value.reshape(len(value), -1) > 0
        statements += [positive, ~positive]
        operands = [values[each] for each in by_name[name].inputs]
        statements += [(each == value).reshape(len(value), -1) for each in operands if each.shape == value.shape]
    return torch.cat(statements, dim=1)
