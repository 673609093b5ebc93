"""Everything that a rank needs to verify, made from a specification and checked before anything is bounded."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from service.bounds.capture import capture
from service.bounds.graph import UnsupportedModelError
from service.bounds.methods import Effort
from service.bounds.network import Network, from_graph, prepare
from service.bounds.optimise import Ascent
from service.bounds.shard import shard
from service.jobs.plugins import Features
from service.jobs.runtime import RunContext
from service.jobs.spec.verify import FromOnnx, VerifySpec
from service.models import build, load_into
from service.models.reference import resolve
from service.parallel.mesh import Mesh
from service.parallel.mesh import build as build_mesh
from service.verification.properties import Property, read

if TYPE_CHECKING:
    from service.bounds.onnx.reading import Runtime


@dataclass(frozen=True, eq=False)
class Task:
    """A property of a model, on this rank of a mesh. A model from ONNX has a ``runtime``."""

    spec: VerifySpec
    mesh: Mesh
    device: torch.device
    module: nn.Module
    network: Network
    asked: Property
    runtime: Runtime | None = None

    @property
    def own(self) -> list[int]:
        """Instances of this data-parallel rank: every ``dp``-th one."""
        return list(range(self.mesh.dp.rank, self.asked.count, self.mesh.dp.size))

    @property
    def method_name(self) -> str:
        """As rows and the result say it."""
        fixed = " (fixed intermediate bounds)" if self.spec.intermediate == "fixed" else ""
        return self.spec.method + fixed

    @property
    def inside(self) -> str:
        """The method that bounds: of a search, its domains and the batches before it."""
        return "crown" if self.spec.method == "beta-crown" else self.method_name

    @property
    def effort(self) -> Effort:
        return Effort(ascent=Ascent(iterations=self.spec.budget.iterations))

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those that bound the same instances."""
        return self.mesh.tp.rank == 0 and self.mesh.pp.rank == 0

    def batches(self, without: Container[int]) -> Iterator[list[int]]:
        left = [instance for instance in self.own if instance not in without]
        size = self.spec.budget.batch
        return (left[start : start + size] for start in range(0, len(left), size))


def make(spec: VerifySpec, context: RunContext, device: torch.device) -> Task:
    """Raises :class:`UnsupportedModelError` or ``PropertyError`` when the model or the property cannot be done."""
    if spec.parallel.pp > 1:
        raise UnsupportedModelError(f"parallel.pp={spec.parallel.pp}: bounds do not cross pipeline stages; use pp=1")
    mesh = build_mesh(spec.parallel, context.device_type)
    if isinstance(spec.model, FromOnnx):
        return _of_onnx(spec, spec.model, context, mesh, device)
    config, weights = resolve(spec.model, context.data)
    reads = config.reads
    if not isinstance(reads, Features):
        raise UnsupportedModelError(
            f"a {config.family} takes token ids, and its first operator, aten.embedding, has no rule: "
            "there is no box of inputs to certify; expected a model that reads features"
        )
    module = build(config, mesh, dtype=torch.float32, device=device, seed=spec.seed)
    if weights is not None:
        load_into(module, weights)
    module.eval().requires_grad_(False)
    network = prepare(module, (reads.features,), mesh.tp)
    return Task(spec, mesh, device, module, network, read(spec.property, reads.features, reads.classes, context.data))


def _of_onnx(spec: VerifySpec, model: FromOnnx, context: RunContext, mesh: Mesh, device: torch.device) -> Task:
    from service.bounds.onnx import load  # noqa: PLC0415 - brings onnxruntime, which only these models need
    from service.bounds.onnx.reading import Runtime, parse  # noqa: PLC0415

    content = context.data.file(model.onnx).read_bytes()
    module = load(content).to(device)
    asked = read(spec.property, module.features, module.outputs, context.data)
    # The graph is divided, not the module: witnesses are judged on the whole of it, on every rank.
    network = from_graph(shard(capture(module, (module.features,)), mesh.tp), mesh.tp)
    return Task(spec, mesh, device, module, network, asked, Runtime.of(parse(content)))
