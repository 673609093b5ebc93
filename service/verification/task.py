"""Everything that a rank needs to verify, made from a specification and checked before anything is bounded."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from service.bounds.capture import capture
from service.bounds.evaluated import Evaluated
from service.bounds.graph import UnsupportedModelError
from service.bounds.methods import METHODS, Effort, Method
from service.bounds.network import Network, from_graph, prepare
from service.bounds.optimise import Ascent
from service.bounds.rigorous import RIGOROUS
from service.bounds.shard import shard
from service.bounds.stages import InStages, Line, Staged, divide_into_stages, prepare_stages
from service.jobs.plugins import Features
from service.jobs.runtime import RunContext
from service.jobs.spec.verify import FromOnnx, RobustnessProperty, VerifySpec, VnnlibProperty
from service.models import build, load_into
from service.models.embedded import AfterEmbedding, embedded
from service.models.reference import resolve
from service.models.transformer import Transformer
from service.parallel.mesh import Mesh
from service.parallel.mesh import build as build_mesh
from service.parallel.tensor import local_copy
from service.verification.properties import Property, read
from service.verification.properties.robustness import RobustSamples
from service.verification.properties.tokens import robust_tokens
from service.verification.search.crew import SOLO, Crew
from service.verification.tally import Layer, layers_of

if TYPE_CHECKING:
    from service.bounds.onnx.reading import Runtime


@dataclass(frozen=True, eq=False)
class Task:
    """A property of a model, on this rank of a mesh.

    A model from ONNX has a ``runtime``. Of a model in stages ``network`` is this rank's, ``layers`` are those of all.
    """

    spec: VerifySpec
    mesh: Mesh
    device: torch.device
    module: nn.Module
    network: Network
    asked: Property
    layers: Sequence[Layer]
    runtime: Runtime | None = None
    staged: Staged | None = None

    @cached_property
    def crew(self) -> Crew:
        """The data-parallel ranks that search together: all where instances are fewer than they are."""
        searches = isinstance(self.spec.property, VnnlibProperty) or self.spec.method == "beta-crown"
        return Crew(self.mesh.dp) if searches and self.asked.count < self.mesh.dp.size else SOLO

    @property
    def groups(self) -> int:
        """How many groups of ranks have instances of their own."""
        return self.mesh.dp.size // self.crew.axis.size

    @property
    def own(self) -> list[int]:
        """Instances of this rank: every ``groups``-th one."""
        return list(range(self.mesh.dp.rank % self.groups, self.asked.count, self.groups))

    @property
    def method_name(self) -> str:
        """As rows and the result say it."""
        return self.spec.method + self._fixed + (" (rigorous)" if self.spec.rigorous else "")

    @property
    def inside(self) -> str:
        """Name of the method that bounds: of a search, its domains and the batches before it."""
        return "crown" if self.spec.method == "beta-crown" else self.spec.method + self._fixed

    @property
    def _fixed(self) -> str:
        return " (fixed intermediate bounds)" if self.spec.intermediate == "fixed" else ""

    @property
    def like(self) -> Tensor:
        """Of the dtype and on the device in which bounds are computed."""
        return torch.empty(0, dtype=torch.float64 if self.spec.rigorous else torch.float32, device=self.device)

    @property
    def method(self) -> Method:
        """It bounds the whole model: all stages call it."""
        method: Method = RIGOROUS[self.inside] if self.spec.rigorous else METHODS[self.inside]
        return method if self.staged is None else self.staged.method(method)

    def anywhere(self, flag: bool) -> bool:
        """Whether the flag is set on a rank that bounds the same instances; all of them call it."""
        found = self.network.exchange.largest(int(self.crew.anywhere(flag, self.device)), self.device)
        return bool(self.of_all_stages(torch.tensor([[found]])).any())

    def of_all_stages(self, values: Tensor) -> Tensor:
        """``(batch, own)`` numbers of this stage to ``(batch, all)``, on the host."""
        return values.cpu() if self.staged is None else self.staged.line.joined(values, 1).cpu()

    @property
    def effort(self) -> Effort:
        return Effort(ascent=Ascent(iterations=self.spec.budget.iterations))

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those that bound the same instances."""
        return self.mesh.tp.rank == 0 and self.mesh.pp.rank == 0 and self.crew.is_first

    def batches(self, without: Container[int]) -> Iterator[list[int]]:
        left = [instance for instance in self.own if instance not in without]
        size = self.spec.budget.batch
        return (left[start : start + size] for start in range(0, len(left), size))


def make(spec: VerifySpec, context: RunContext, device: torch.device) -> Task:
    """Raises :class:`UnsupportedModelError` or ``PropertyError`` when the model or the property cannot be done."""
    mesh = build_mesh(spec.parallel, context.device_type)
    if isinstance(spec.model, FromOnnx):
        return _of_onnx(spec, spec.model, context, mesh, device)
    config, weights = resolve(spec.model, context.data)
    reads = config.reads
    module = build(config, mesh, dtype=torch.float32, device=device, seed=spec.seed)
    if weights is not None:
        load_into(module, weights)
    module.eval().requires_grad_(False)
    line = Line(mesh, device) if mesh.pp.size > 1 else None
    asked: Property
    if isinstance(reads, Features):
        asked, shape = read(spec.property, reads.features, reads.classes, context.data), (reads.features,)
    else:
        asked, module = _of_tokens(spec, module, context, line)
        shape = (asked.samples.inputs.shape[1],)
    if line is not None:
        staged = prepare_stages(module, shape, mesh.tp, line)
        layers = _layers_of_stages(staged, mesh.tp.size)
        return Task(spec, mesh, device, InStages(module, line), staged.network, asked, layers, staged=staged)
    network = prepare(_bounded(spec, module), shape, mesh.tp)
    return Task(spec, mesh, device, module, network, asked, layers_of(network, mesh.tp.size))


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


def _of_onnx(spec: VerifySpec, model: FromOnnx, context: RunContext, mesh: Mesh, device: torch.device) -> Task:
    from service.bounds.onnx import load  # noqa: PLC0415 - brings onnxruntime, which only these models need
    from service.bounds.onnx.reading import Runtime, parse  # noqa: PLC0415

    content = context.data.file(model.onnx).read_bytes()
    module = load(content)
    asked = read(spec.property, module.features, module.outputs, context.data)
    if mesh.pp.size > 1:
        graph = shard(capture(module, (module.features,)), mesh.tp)
        staged = divide_into_stages(graph, mesh.tp, line := Line(mesh, device))
        stage = InStages(Evaluated(staged.network.graph), line)
        layers = _layers_of_stages(staged, mesh.tp.size)
        return Task(spec, mesh, device, stage, staged.network, asked, layers, Runtime.of(parse(content)), staged)
    module = module.to(device)
    # The graph is divided, not the module: witnesses are judged on the whole of it, on every rank.
    network = from_graph(shard(capture(_bounded(spec, module), (module.features,)), mesh.tp), mesh.tp)
    layers = layers_of(network, mesh.tp.size)
    return Task(spec, mesh, device, module, network, asked, layers, Runtime.of(parse(content)))
