"""A small program to be trained: an encoder, and a head that is called several times a step; Adam with momentum."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from training_runs import JOB, Recording

from service.jobs.files import DataLayout
from service.jobs.plugins import ProgramConfig, ProgramKind
from service.jobs.plugins.catalogue import _Provided
from service.jobs.runtime import RunContext
from service.jobs.spec.program import PROGRAMS
from service.jobs.spec.train import TrainSpec
from service.models.program import Parts, Site, Step
from service.parallel import distributed
from service.parallel.boundary import StepBoundary
from service.training import job

WIDTH, ROWS = 6, 5


class Walker(ProgramConfig):
    """Walks ``calls`` times a step. ``fault`` names what it does wrong at step ``at``."""

    name: Literal["walker"] = "walker"
    calls: int = 2
    rows: int = ROWS
    first: bool = True
    evaluates: bool = True
    reads: bool = True
    optimizer: str = "Adam"
    lr: float = 0.05
    sharded: bool = False
    fault: str = ""
    at: int = 3


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(x))) * weight


class Program:
    period = 1

    def __init__(self, config: Walker, site: Site) -> None:
        self.config, self.device = config, site.device
        self.kept: list[Tensor] = []

    def build(self, dtype: torch.dtype) -> Parts:
        torch.manual_seed(1)
        encoder, head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), Head()
        modules: dict[str, nn.Module] = {"encoder": encoder, "head": head}
        if self.config.fault == "no parts":
            return modules  # type: ignore[return-value]
        if self.config.fault == "stateless":
            modules = {"encoder": nn.ReLU()}
            return Parts(modules, ("encoder",), (), dtype)
        for module in modules.values():
            module.to(self.device, dtype)
            if self.config.sharded:
                fully_shard(module)
        optimizers = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD, "LBFGS": torch.optim.LBFGS}
        extra = {"SGD": {"momentum": 0.9}}.get(self.config.optimizer, {})
        parameters = [*encoder.parameters(), *head.parameters()]
        if self.config.fault == "loose":
            parameters = [*parameters, nn.Parameter(torch.ones(3))]
        if self.config.optimizer == "two":
            both = tuple(torch.optim.SGD(module.parameters(), lr=0.05) for module in (encoder, head))
            return Parts(modules, ("encoder", "head"), both, dtype)
        optimizer = optimizers[self.config.optimizer](parameters, lr=self.config.lr, **extra)
        return Parts(modules, ("encoder", "head"), (optimizer,), dtype)

    def _walk(self, parts: Parts, boundary: StepBoundary, x: Tensor, calls: int) -> Tensor:
        found = boundary.boundary_call(parts.modules["encoder"], x)
        for _ in range(calls):
            found = found + boundary.boundary_call(parts.modules["head"], found, x.new_ones(()))
        return found

    def _steps(self, parts: Parts, boundary: StepBoundary, first: int) -> Iterator[Step]:
        (optimizer,) = parts.optimizers
        for module in parts.modules.values():
            module.train()
        number, size = first, 0.5 + torch.rand(())  # drawn once, as an order of samples may be
        while True:
            number += 1
            if self.config.fault == "draws":
                torch.rand(())
            fault = self.config.fault if number == self.config.at else ""
            if fault != "no boundary":
                boundary.step_boundary()
            if fault == "raises":
                raise KeyError("no such room")
            if fault == "ends":
                return
            rows = self.config.rows + (fault == "other rows")
            x = torch.randn(rows, WIDTH) * (size + 0.1 * (number % 3))
            found = self._walk(parts, boundary, x, self.config.calls + (fault == "more calls"))
            loss = (found - x).square().mean() * (float("nan") if fault == "nan" else 1)

            if self.config.optimizer == "LBFGS":
                optimizer.step(partial(self._again, parts, boundary, x))
            else:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            parts.modules["head"].get_buffer("seen").add_(2 if fault == "counts" and dist.get_rank() else 1)
            if self.config.fault == "allocates":
                self.kept += [torch.zeros(3, 3) for _ in range(500)]
            if fault == "allocates":
                raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
            if fault == "no step":
                yield {"loss": loss}  # type: ignore[misc]
            if fault == "no tensor":
                yield Step({"loss": loss.item()})  # type: ignore[dict-item]
            outputs = {} if fault == "other names" else {"found": found.detach()[: None if fault != "shape" else 2]}
            yield Step({} if fault == "no loss" else {"loss": loss.detach(), "twice": 2 * loss.detach()}, outputs)

    def _again(self, parts: Parts, boundary: StepBoundary, x: Tensor) -> Tensor:
        (optimizer,) = parts.optimizers
        optimizer.zero_grad()
        loss = (self._walk(parts, boundary, x, 1) - x).square().mean()
        loss.backward()
        return loss

    def train(self, parts: Parts, boundary: StepBoundary, first: int = 0) -> Iterator[Step]:
        return self._steps(parts, boundary, first)

    def inference(
        self, parts: Parts, boundary: StepBoundary, first: int = 0, batches: Iterator[Tensor] | None = None
    ) -> Iterator[Step]:
        for module in parts.modules.values():
            module.eval()
        for number in count(first + 1):
            boundary.step_boundary()
            fault = self.config.fault if number == self.config.at else ""
            if fault == "raises":
                raise KeyError("no such room")
            rows = self.config.rows + (fault == "grows")
            with torch.no_grad():
                x = torch.randn(rows, WIDTH) if batches is None else next(batches)
                yield Step(outputs={"found": self._walk(parts, boundary, x, 2), "sum": x.sum()})

    def evaluate(self, parts: Parts, boundary: StepBoundary) -> Mapping[str, float]:
        for module in parts.modules.values():
            module.eval()
        errors = []
        for _ in range(2):
            boundary.step_boundary()
            with torch.no_grad():
                x = torch.randn(self.config.rows, WIDTH)
                errors.append((self._walk(parts, boundary, x, self.config.calls) - x).square().mean().item())
        return {"error": sum(errors) / len(errors)}


class BeginsAnew(Program):
    """Cannot be told where to go on."""

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:  # type: ignore[override]
        return self._steps(parts, boundary, 0)


class Unmeasured(Program):
    evaluate = property()  # type: ignore[assignment]


class Unreading(Program):
    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:  # type: ignore[override]
        return super().inference(parts, boundary)


def make(config: Walker, site: Site) -> Program:
    if config.sharded:
        assert dist.is_initialized()
    kinds = {"first": BeginsAnew, "evaluates": Unmeasured, "reads": Unreading}
    return next((kind for lacks, kind in kinds.items() if not getattr(config, lacks)), Program)(config, site)


@contextmanager
def installed() -> Iterator[None]:
    """Let this process find the program as that of an installed package."""
    sys.modules.setdefault("walker", sys.modules[__name__])
    provided = _Provided(ProgramKind(Walker, "walker:make"), "walking", "1.0")
    with patch.dict(PROGRAMS.provided, {"walker": provided}):
        yield


def spec_of(program: Walker, **fields: Any) -> TrainSpec:
    """Return a training's spec; only where the package is installed could it be read from text."""
    read = {"kind": "train", "model": {"family": "mlp", "in_features": 1, "hidden": [1], "out_features": 2}}
    base = TrainSpec.model_validate({**read, "data": {"source": "digits"}, "steps": 6, **fields})
    return base.model_copy(update={"program": program, "model": None, "data": None})


def train(
    folder: Path | str,
    program: Walker | None = None,
    *,
    killed_at: int | None = None,
    stop_after: int | None = None,
    report: Recording | None = None,
    attempt: int = 1,
    **fields: Any,
) -> tuple[dict[str, Any] | None, Recording]:
    """Run the job on this rank; ``killed_at`` ends it without a word while that step runs."""
    torch.set_num_threads(1)
    distributed.start("cpu")
    report, world = report or Recording(), dist.get_world_size() if dist.is_initialized() else 1
    rank, asked = dist.get_rank() if world > 1 else 0, 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        if killed_at is not None and asked == killed_at:
            raise SystemExit
        return stop_after is not None and asked >= stop_after

    data = DataLayout(Path(folder))
    context = RunContext(JOB, attempt, rank, rank, world, "cpu", data, report, should_stop)
    with ExitStack() as stack:
        stack.enter_context(installed())
        return job.run(spec_of(program or Walker(), **fields), context), report
