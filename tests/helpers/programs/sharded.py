"""FSDP2 on two ranks: programs that train and are compiled, compile only a part, or train nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.optim import SGD

from service.compilation.program import Parts, Step
from service.parallel.boundary import StepBoundary

FEATURES, CLASSES, ROWS = 8, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def score(self, x: Tensor) -> Tensor:
        """As ``forward``; FSDP gathers its parameters too where it is registered."""
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class Scoring(Blocks):
    """Calls its second block by a method of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second.score(self.first(x)))


def blocks() -> nn.Module:
    return Blocks()


def scoring() -> nn.Module:
    return Scoring()


def sequential() -> nn.Module:
    """A container of PyTorch's own, whose frames Dynamo skips."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


@dataclass(frozen=True)
class Sharded:
    """``compiles_autograd``: where the model is compiled, the backward is too."""

    make: Any
    device: torch.device
    compiles_autograd: bool = False
    period: int = 1

    def build(self, dtype: torch.dtype) -> Parts:
        torch.manual_seed(3)
        model = self.make().to(self.device, dtype)
        mesh = init_device_mesh(self.device.type, (2,))
        for part in model.modules():
            if isinstance(part, Block):
                fully_shard(part, mesh=mesh)
                register_fsdp_forward_method(part, "score")
        fully_shard(model, mesh=mesh)
        return Parts({"model": model}, ("model",), (SGD(model.parameters(), lr=0.1, foreach=False),), dtype)

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        parts.modules["model"].train()
        for number in count():
            yield self._step(parts, boundary, number)

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        for number in count():
            boundary.step_boundary()
            with torch.no_grad():
                yield Step(
                    outputs={"output": boundary.boundary_call(parts.modules["model"], self._batch(parts, number))}
                )

    def _batch(self, parts: Parts, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * number + torch.distributed.get_rank())
        return torch.randn(ROWS, FEATURES, generator=generator).to(self.device, parts.dtype)

    def _step(self, parts: Parts, boundary: StepBoundary, number: int) -> Step:
        boundary.step_boundary()
        model, (optimizer,) = parts.modules["model"], parts.optimizers
        optimizer.zero_grad()
        loss = boundary.boundary_call(model, self._batch(parts, number)).square().mean()
        with self._autograd(model):
            loss.backward()
        optimizer.step()
        return Step({"loss": loss.detach()})

    def _autograd(self, model: nn.Module) -> AbstractContextManager[Any]:
        if not self.compiles_autograd or all(part._compiled_call_impl is None for part in model.modules()):
            return nullcontext()
        from torch._dynamo import compiled_autograd

        enabled: AbstractContextManager[Any] = compiled_autograd._enable(torch.compile(backend="eager"), dynamic=True)
        return enabled
