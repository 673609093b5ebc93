"""The verification job: certify a property of a model, on this rank of a mesh."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from service.bounds.graph import UnsupportedModelError
from service.bounds.methods import METHODS, Effort
from service.bounds.network import Network, prepare
from service.jobs.plugins import Features
from service.jobs.runtime import RunContext
from service.jobs.spec.verify import FromOnnx, VerifySpec
from service.models import build, load_into
from service.models.reference import resolve
from service.parallel import distributed
from service.parallel.mesh import Mesh
from service.parallel.mesh import build as build_mesh
from service.parallel.tensor import local_copy
from service.verification import report
from service.verification.certify import Verdict, certify
from service.verification.properties import Property, read
from service.verification.properties.queried import Queried
from service.verification.search import Subject, decide
from service.verification.tally import LayerTally, Row, gather_rows, rows_of, summary
from service.verification.witness import Referee

if TYPE_CHECKING:
    from service.bounds.onnx.reading import Runtime


@dataclass(frozen=True, eq=False)
class Task:
    """Everything that a rank needs, checked before anything is bounded."""

    spec: VerifySpec
    mesh: Mesh
    device: torch.device
    module: nn.Module
    network: Network
    asked: Property
    runtime: Runtime | None = None

    @property
    def batches(self) -> Iterator[list[int]]:
        """Instances of this data-parallel rank: every ``dp``-th one, in batches."""
        own = list(range(self.mesh.dp.rank, self.asked.count, self.mesh.dp.size))
        size = self.spec.budget.batch
        return (own[start : start + size] for start in range(0, len(own), size))


def run(spec: VerifySpec, context: RunContext) -> dict[str, Any] | None:
    """Bound every instance, reporting rows as they are found; rank 0 returns the result.

    Tensor-parallel ranks bound the same instances together, data-parallel ranks different ones. Raises
    :class:`UnsupportedModelError` or ``PropertyError`` before any bounding when the model or the property cannot be
    done.
    """
    started = time.monotonic()
    # A last bit of float32 decides nothing here, but TF32's ten-bit products would.
    torch.set_float32_matmul_precision("highest")
    device = distributed.start(context.device_type)
    task = _prepare(spec, context, device)
    context.report.log(f"{task.asked.count} instances by {spec.method} on {spec.parallel.arithmetic} ranks")
    layers = LayerTally(task.network)
    own = list(_bound_all(task, context, layers))
    rows = gather_rows(own, task.asked.count, spec.method, task.mesh, device)
    totals = layers.totals(task.mesh, device)
    if context.rank != 0:
        return None
    context.report.artifact(report.write(rows, context.paths.artifacts), report.MEDIA_TYPE)
    outcome = summary(rows, task.asked.has_labels, task.asked.eps)
    return {**outcome, "method": spec.method, "layers": totals, "wall_seconds": time.monotonic() - started}


def _prepare(spec: VerifySpec, context: RunContext, device: torch.device) -> Task:
    if spec.parallel.pp > 1:
        raise UnsupportedModelError(f"parallel.pp={spec.parallel.pp}: bounds do not cross pipeline stages; use pp=1")
    mesh = build_mesh(spec.parallel, context.device_type)
    if isinstance(spec.model, FromOnnx):
        return _prepare_onnx(spec, spec.model, context, mesh, device)
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


def _prepare_onnx(spec: VerifySpec, model: FromOnnx, context: RunContext, mesh: Mesh, device: torch.device) -> Task:
    from service.bounds.onnx import load  # noqa: PLC0415 - brings onnxruntime, which only these models need
    from service.bounds.onnx.reading import Runtime, parse  # noqa: PLC0415

    content = context.data.file(model.onnx).read_bytes()
    module = load(content).to(device)
    asked = read(spec.property, module.features, module.outputs, context.data)
    network = prepare(module, (module.features,), mesh.tp)
    return Task(spec, mesh, device, module, network, asked, Runtime.of(parse(content)))


def _decided(task: Task, asked: Queried, instance: int) -> Row:
    """What the search adds to the row of a query."""
    judge = local_copy(task.module).double()
    subject = Subject(task.module, task.network, judge, task.runtime, torch.float32)
    decision = decide(subject, asked.queries[instance], task.spec.method, task.spec.budget.seconds)
    late = decision.verdict is Verdict.UNKNOWN and decision.seconds >= task.spec.budget.seconds
    return {
        "verdict": "timeout" if late else decision.verdict.value,
        "counterexample": None if decision.counterexample is None else list(decision.counterexample),
        "domains": max(decision.domains, 1),
        "seconds": decision.seconds,
    }


def _bound_all(task: Task, context: RunContext, layers: LayerTally) -> Iterator[Row]:
    """The rows of this data-parallel rank's instances, until they are done or the attempt is asked to end."""
    exchange, mesh = task.network.exchange, task.mesh
    referee = Referee(task.module, exchange, task.runtime)
    like = torch.empty(0, dtype=torch.float32, device=task.device)
    done = 0
    for instances in task.batches:
        # A group stops as one: its ranks would otherwise wait for each other in a collective.
        if exchange.largest(int(context.should_stop()), task.device):
            return
        begun = time.time()
        question = task.asked.ask(instances, like)
        outcome = certify(task.network, referee, METHODS[task.spec.method], Effort(), question)
        layers.add(outcome)
        context.report.span("bound", begun, time.time(), {"instances": len(instances)})
        done += len(instances)
        for bounded in rows_of(outcome, task.spec.method):
            searched = _decided(task, task.asked, bounded["instance"]) if isinstance(task.asked, Queried) else {}
            row = {**bounded, **searched}
            if mesh.tp.rank == 0:
                context.report.bound(row)
            yield row
        if context.rank == 0:
            context.report.progress(min(done * mesh.dp.size, task.asked.count), task.asked.count, "instances")
