"""Loads the tasks for the models of a job on this rank, and refuses those that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from service.bounds.capture import capture
from service.bounds.graph import Graph, UnsupportedModelError
from service.bounds.memory import is_out_of_memory, make_room
from service.bounds.network import Network, from_graph, prepare
from service.bounds.stages import InStages, StageLink, divide_into_stages, prepare_stages
from service.jobs.runtime import NullReporter, Reporter
from service.jobs.spec.verify import VerifySpec
from service.parallel.collectives import resolve
from service.parallel.distributed import gather
from service.parallel.mesh import Mesh
from service.verification.engine import Arithmetic, BoundingEngine, NetworkEngine, StagesEngine
from service.verification.load.trace_cache import TraceCache
from service.verification.properties import Property
from service.verification.results import NonlinearLayer
from service.verification.task import Assignment, RefusedModel, Task, arithmetic_of, memory_of

if TYPE_CHECKING:
    from service.bounds.onnx.model import Running


@dataclass(frozen=True, eq=False)
class LoadedTasks:
    """A task for each model that can be bounded, and the models that cannot; all are of one ``assignment``."""

    assignment: Assignment
    tasks: tuple[Task, ...]
    refused: tuple[RefusedModel, ...]


def _layers_of(network: Network, tp: int) -> list[NonlinearLayer]:
    """Return the non-linear nodes of a network, in execution order, by the names of its file where it has any."""
    nodes = network.nonlinear
    return [
        NonlinearLayer(
            node.source or node.name, node.operator, node.size * (tp if network.is_own(node.inputs[0]) else 1)
        )
        for node in nodes
    ]


@dataclass(frozen=True, eq=False)
class TaskLoader:
    """Makes tasks on this rank of the job's mesh; ``line`` connects the stages that each model is divided into. Models
    compute in ``dtype``. The reporter gets the phase ``preparing`` once models are read. ``traces`` has those
    of earlier jobs.
    """

    spec: VerifySpec
    mesh: Mesh
    device: torch.device
    line: StageLink
    dtype: torch.dtype = torch.float32
    report: Reporter = field(default_factory=NullReporter)
    traces: TraceCache = field(default_factory=TraceCache)

    @property
    def is_alone(self) -> bool:
        """Return whether this rank has models whole, so that no other waits while it prepares one."""
        return self.line.size == 1 and self.mesh.tp.size == 1

    @property
    def arithmetic(self) -> Arithmetic:
        """Return the arithmetic in which models are bounded."""
        return arithmetic_of(self.spec).for_numbers(self.dtype)

    def engine_of_module(self, module: nn.Module, input_shape: Sequence[int]) -> BoundingEngine:
        """Trace a module, this rank's part of the model, into the model's engine; all ranks of the model call it."""
        self.report.phase("preparing")
        if self.line.size > 1:
            return StagesEngine(prepare_stages(module, input_shape, self.mesh.tp, self.line), self.arithmetic)
        return NetworkEngine(prepare(module, input_shape, self.mesh.tp), self.arithmetic, self.device)

    def engine_of_content(self, module: nn.Module, input_shape: Sequence[int], content: str) -> BoundingEngine:
        """Return the engine of a module that this rank has whole, traced now or by an earlier job; ``content`` names
        its file.
        """
        self.report.phase("preparing")
        like = next(chain(module.parameters(), module.buffers()))
        graph = self.traces.graph(content, like.dtype, like.device, lambda: capture(module, input_shape))
        return NetworkEngine(from_graph(graph, self.mesh.tp), self.arithmetic, self.device)

    def engine_of_graph(self, graph: Graph) -> BoundingEngine:
        """Return the engine of a model whose traced graph has all stages; all ranks of the model call it."""
        self.report.phase("preparing")
        if self.line.size > 1:
            return StagesEngine(divide_into_stages(graph, self.mesh.tp, self.line), self.arithmetic)
        return NetworkEngine(from_graph(graph.to(self.device), self.mesh.tp), self.arithmetic, self.device)

    def task(self, module: nn.Module, engine: BoundingEngine, asked: Property, runtime: Running | None = None) -> Task:
        """Return the task of a model of which ``module`` is this rank's part; all ranks of the model call it."""
        model = module if engine.stages is None else InStages(module, self.line)
        return Task(self.spec, self.mesh, self.device, asked, model, engine, self._layers(engine), runtime)

    def _layers(self, engine: BoundingEngine) -> list[NonlinearLayer]:
        """Return the layers of all stages, in order; every stage calls it."""
        own = _layers_of(engine.network, self.mesh.tp.size)
        if engine.stages is None:
            return own
        named = [replace(layer, name=f"stage {self.line.rank}: {layer.name}") for layer in own]
        return [layer for layers in gather(named, resolve(self.mesh.pp.group)) for layer in layers]

    def unless_too_large(self, load: Callable[[], Task], asked: Callable[[], Property]) -> Task | RefusedModel:
        """Return the task, or the shortage of memory to prepare it if no other rank waits."""
        try:
            return load()
        except Exception as error:
            if not self.is_alone or not is_out_of_memory(error):
                raise
            shortage = memory_of(self.spec).shortage("preparing the model", self.device, error)
        make_room(self.device)
        refused = asked()
        return RefusedModel(frozenset(range(refused.count)), str(shortage), refused)

    def collected(self, loaded: Sequence[Task | RefusedModel]) -> LoadedTasks:
        """Gather the loaded tasks; raises :class:`UnsupportedModelError` if no model can be bounded."""
        tasks = tuple(each for each in loaded if isinstance(each, Task))
        refused = tuple(each for each in loaded if isinstance(each, RefusedModel))
        assignment = tasks[0] if tasks else self._assignment_of(refused)
        is_large = any(each.asked is not None for each in refused)
        group = assignment.search_group
        if group.axis.size > 1 and group.anywhere(is_large, self.device):
            # Ranks that search together need the model on every one of them.
            reason = next((each.reason for each in refused), "out of memory in preparing the model on another rank")
            every = RefusedModel(frozenset(range(assignment.asked.count)), reason, assignment.asked)
            return LoadedTasks(assignment, (), (every,))
        return LoadedTasks(assignment, tasks, refused)

    def _assignment_of(self, refused: Sequence[RefusedModel]) -> Assignment:
        asked = next((each.asked for each in refused if each.asked is not None), None)
        if asked is None:
            raise refused[0].fault or UnsupportedModelError(refused[0].reason)
        return Assignment(self.spec, self.mesh, self.device, asked)
