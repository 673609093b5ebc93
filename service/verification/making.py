"""The tasks of a specification: models read, checked and prepared for bounding."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from service.bounds.capture import capture
from service.bounds.evaluated import Evaluated
from service.bounds.exchange import Exchange
from service.bounds.graph import UnsupportedModelError
from service.bounds.memory import MemoryShortageError, is_out_of_memory, make_room
from service.bounds.network import Network, from_graph, prepare
from service.bounds.shard import shard
from service.bounds.stages import InStages, Line, Staged, divide_into_stages, prepare_stages
from service.formats.vnnlib import Bundle, Pair, VnnlibError, bundle
from service.jobs.layout import DataLayout
from service.jobs.plugins import Features
from service.jobs.runtime import RunContext
from service.jobs.spec.verify import FromOnnx, InstancesProperty, RobustnessProperty, VerifySpec
from service.models import build, load_into
from service.models.build_once import build_once
from service.models.embedded import AfterEmbedding, embedded
from service.models.reference import resolve
from service.models.transformer import Transformer
from service.parallel.mesh import Mesh
from service.parallel.mesh import build as build_mesh
from service.parallel.tensor import local_copy
from service.verification.first_rank_runtime import FirstRankRuntime
from service.verification.properties import Property, PropertyError, read
from service.verification.properties.queried import Queried, check_sizes, paired
from service.verification.properties.robustness import RobustSamples
from service.verification.properties.tokens import robust_tokens
from service.verification.results import Layer, layers_of
from service.verification.task import Assignment, Refused, Task, memory_of

if TYPE_CHECKING:
    from service.bounds.onnx.model import Running


@dataclass(frozen=True, eq=False)
class Prepared:
    """A task for each model, and those that there is none for; all are of one ``assignment``."""

    assignment: Assignment
    tasks: tuple[Task, ...]
    refused: tuple[Refused, ...]


def make(spec: VerifySpec, context: RunContext, device: torch.device) -> Prepared:
    """One for each model; of several models those that cannot be bounded are told apart, and any that is too large.

    Raises :class:`UnsupportedModelError` or ``PropertyError`` when no model or the property cannot be done.
    """
    mesh = build_mesh(spec.parallel, context.device_type)
    place = _Place(mesh, device, Line(mesh, device) if mesh.pp.size > 1 else None)
    if isinstance(spec.property, InstancesProperty):
        return place.prepared(spec, list(_of_pairs(spec, spec.property.instances, context.data, place)))
    if isinstance(spec.model, FromOnnx):
        file, asked = spec.model.onnx, spec.property
        source = _Source(context.data.cache, file, context.data.file(file).read_bytes)
        found = _of_onnx(spec, source, place, lambda sizes: read(asked, *sizes, context.data))
    else:
        found = _of_reference(spec, context, place)
    return place.prepared(spec, [found])


@dataclass(frozen=True, eq=False)
class _Place:
    """This rank: its mesh, its device, and the pipeline's line, which all models of the job go by."""

    mesh: Mesh
    device: torch.device
    line: Line | None

    def prepared(self, spec: VerifySpec, found: Sequence[Task | Refused]) -> Prepared:
        tasks = tuple(each for each in found if isinstance(each, Task))
        refused = tuple(each for each in found if isinstance(each, Refused))
        if tasks:
            assignment: Assignment = tasks[0]
        else:
            asked = next((each.asked for each in refused if each.asked is not None), None)
            if asked is None:
                raise UnsupportedModelError(refused[0].reason)
            assignment = Assignment(spec, self.mesh, self.device, asked)
        is_large = any(each.asked is not None for each in refused)
        if assignment.search_group.axis.size > 1 and assignment.search_group.anywhere(is_large, self.device):
            return Prepared(assignment, (), _of_a_search_group(assignment, refused))
        return Prepared(assignment, tasks, refused)

    def unless_too_large(
        self, spec: VerifySpec, run: Callable[[], Task], asked: Callable[[], Property]
    ) -> Task | Refused:
        """The task, or that there is not enough memory to prepare it, where no other rank waits."""
        try:
            return run()
        except Exception as error:
            if not self.is_alone or not is_out_of_memory(error):
                raise
            shortage = memory_of(spec).shortage("preparing the model", self.device, error)
        make_room(self.device)
        found = asked()
        return Refused(frozenset(range(found.count)), str(shortage), found)

    def task(
        self,
        spec: VerifySpec,
        module: nn.Module,
        bounded: Network | Staged,
        asked: Property,
        runtime: Running | None = None,
    ) -> Task:
        """Of a module, or of a stage of one, and what bounds it."""
        staged = bounded if isinstance(bounded, Staged) else None
        if isinstance(bounded, Staged):
            layers, network = _layers_of_stages(bounded, self.mesh.tp.size), bounded.network
            module = InStages(module, bounded.line)
        else:
            layers, network = layers_of(bounded, self.mesh.tp.size), bounded
        return Task(spec, self.mesh, self.device, asked, module, network, layers, runtime, staged)

    @property
    def is_alone(self) -> bool:
        """Whether this rank has models whole, so that no other waits while it prepares one."""
        return self.line is None and self.mesh.tp.size == 1


def _of_a_search_group(assignment: Assignment, refused: Sequence[Refused]) -> tuple[Refused, ...]:
    """All instances: ranks that search together need the model on every one of them."""
    reason = next((each.reason for each in refused), "out of memory in preparing the model on another rank")
    return (Refused(frozenset(range(assignment.asked.count)), reason, assignment.asked),)


def _of_reference(spec: VerifySpec, context: RunContext, place: _Place) -> Task | Refused:
    assert spec.model is not None
    assert not isinstance(spec.model, FromOnnx)
    assert not isinstance(spec.property, InstancesProperty)
    config, weights = resolve(spec.model, context.data)
    reads, asked_of = config.reads, spec.property

    def asked() -> Property:
        if not isinstance(reads, Features):
            raise MemoryShortageError("the model embeds the property's tokens, and does not fit", "preparing the model")
        return read(asked_of, reads.features, reads.classes, context.data)

    def made() -> Task:
        module = build(config, place.mesh, dtype=torch.float32, device=place.device, seed=spec.seed)
        if weights is not None:
            load_into(module, weights)
        module.eval().requires_grad_(False)
        if isinstance(reads, Features):
            found, shape = asked(), (reads.features,)
        else:
            found, module = _of_tokens(spec, module, context, place.line)
            shape = (found.samples.inputs.shape[1],)
        tp = place.mesh.tp
        if place.line is not None:
            return place.task(spec, module, prepare_stages(_bounded(spec, module), shape, tp, place.line), found)
        return place.task(spec, module, prepare(_bounded(spec, module), shape, tp), found)

    return place.unless_too_large(spec, made, asked)


def _of_tokens(
    spec: VerifySpec, module: nn.Module, context: RunContext, line: Line | None
) -> tuple[RobustSamples, nn.Module]:
    """The property of embedded tokens, and what follows the embedding, which only the first stage has."""
    if not isinstance(module, Transformer) or not isinstance(spec.property, RobustnessProperty):
        raise UnsupportedModelError(
            "a model of tokens takes ids, and its first operator, aten.embedding, has no rule: there is no box of "
            "inputs to certify; expected a model that reads features, or a transformer and robustness"
        )
    model, device = module, next(module.parameters()).device

    def embed(ids: Tensor) -> Tensor:
        if line is None:
            return embedded(model, ids.to(device))
        return line.of_first(embedded(model, ids.to(device)) if line.is_first else None)

    asked = robust_tokens(spec.property, model.config, embed, context.data)
    return asked, AfterEmbedding(model, asked.samples.inputs.shape[1] // model.config.dim)


def _layers_of_stages(staged: Staged, tp: int) -> list[Layer]:
    own = [replace(layer, name=f"stage {staged.line.rank}: {layer.name}") for layer in layers_of(staged.network, tp)]
    text = "".join(json.dumps(asdict(layer)) + "\n" for layer in own)
    everyone = bytes(staged.line.joined(torch.tensor(list(text.encode()), dtype=torch.uint8)).tolist()).decode()
    return [Layer(**json.loads(line)) for line in everyone.splitlines()]


def _bounded(spec: VerifySpec, module: nn.Module) -> nn.Module:
    """Rigorous bounds are of the float64 function that has the module's weights."""
    return local_copy(module).double() if spec.rigorous else module


def _of_pairs(spec: VerifySpec, file: str, data: DataLayout, place: _Place) -> Iterator[Task | Refused]:
    """Raises what a model cannot do where it is divided over ranks: each of them would have to know of it."""
    archive = data.file(file)
    divided = place.line is not None or place.mesh.tp.size > 1
    try:
        with bundle(archive) as opened:
            asked, parts = paired(opened), defaultdict[str, list[int]](list)
            for instance, pair in enumerate(opened.pairs):
                parts[pair.model].append(instance)
            for name, part in parts.items():
                fitting = partial(_fitting, opened, asked, part)
                source = _Source(data.cache, f"{file}:{name}", partial(_model, archive, opened.pairs[part[0]]))
                try:
                    task = _of_onnx(spec, source, place, fitting)
                except UnsupportedModelError as error:
                    if divided:
                        raise UnsupportedModelError(f"{name}: {error}") from error
                    yield Refused(frozenset(part), f"{name}: {error}")
                    continue
                if isinstance(task, Refused):
                    yield Refused(frozenset(part), f"{name}: {task.reason}", asked)
                    continue
                layers = [replace(layer, name=f"{name}: {layer.name}") for layer in task.layers]
                yield replace(task, layers=layers, part=frozenset(part))
    except (OSError, VnnlibError) as error:
        raise PropertyError(f"property.instances: {error}") from error


def _model(archive: Path, pair: Pair) -> bytes:
    with bundle(archive) as opened:
        content = opened.model(pair)
    if content is None:
        raise PropertyError(f"property.instances: {pair.model} is larger than an ONNX file can be")
    return content


def _fitting(opened: Bundle, asked: Queried, part: Sequence[int], sizes: tuple[int, int]) -> Queried:
    """The queries, once those of a model are known to fit it."""
    for instance in part:
        check_sizes(opened.pairs[instance].name, asked.queries[instance], sizes)
    return asked


@dataclass(frozen=True)
class _Source:
    """An ONNX file, whose content is read only where it is needed; ``name`` is of this content alone."""

    cache: Path
    name: str
    read: Callable[[], bytes]

    def folder(self, dtype: torch.dtype) -> Path:
        """For what ranks map, to bound the model in ``dtype``."""
        from service.bounds.onnx.stored import VERSION  # noqa: PLC0415 - brings onnxruntime

        name = hashlib.sha256(f"{self.name} {dtype}".encode()).hexdigest()
        return self.cache / f"onnx-{VERSION}" / name


def _of_onnx(
    spec: VerifySpec, source: _Source, place: _Place, ask: Callable[[tuple[int, int]], Property]
) -> Task | Refused:
    from service.bounds.onnx import load  # noqa: PLC0415 - brings onnxruntime, which only these models need
    from service.bounds.onnx.reading import Runtime, describe, parse  # noqa: PLC0415

    if not place.is_alone:
        return _of_divided_onnx(spec, source, place, ask)
    content = source.read()

    def made() -> Task:
        module = load(content)
        asked, runtime = ask((module.features, module.outputs)), Runtime.of(parse(content))
        module = module.to(place.device)
        return place.task(spec, module, prepare(_bounded(spec, module), (module.features,)), asked, runtime)

    return place.unless_too_large(spec, made, lambda: ask(describe(parse(content)).sizes))


def _of_divided_onnx(
    spec: VerifySpec, source: _Source, place: _Place, ask: Callable[[tuple[int, int]], Property]
) -> Task:
    """Only this rank's stage and shares go to its memory and its device, and are what witnesses are judged on."""
    from service.bounds.onnx.model import check  # noqa: PLC0415
    from service.bounds.onnx.reading import Runtime, parse  # noqa: PLC0415
    from service.bounds.onnx.stored import store, stored, type_of  # noqa: PLC0415

    dtype, tp = torch.float64 if spec.rigorous else torch.float32, place.mesh.tp
    folder = build_once(source.folder(dtype), lambda path: store(path, source.read(), dtype))
    module = stored(folder, dtype)
    sizes = module.features, module.outputs
    asked = ask(sizes)
    runtime = FirstRankRuntime(
        lambda: Runtime.of(parse(source.read())), sizes[1], type_of(folder), Exchange(tp), place.line, place.device
    )
    whole: list[str] = []
    graph = shard(capture(module, sizes[:1]), tp, whole.append)
    if place.line is not None:
        staged = divide_into_stages(graph, tp, place.line)
        task = place.task(spec, Evaluated(staged.network.graph), staged, asked, runtime)
    else:
        graph = graph.to(place.device)
        task = place.task(spec, Evaluated(graph), from_graph(graph, tp), asked, runtime)
    check(lambda x: task.module(x.to(task.like)), sizes[0], replace(runtime))
    return replace(task, notes=tuple(whole))
