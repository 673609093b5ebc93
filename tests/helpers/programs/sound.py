"""Ways of writing a program that are right, and that a compile check may take for a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from service.compilation.program import Parts, Step
from service.parallel.boundary import StepBoundary

CPU = torch.device("cpu")
FEATURES, CLASSES = 6, 3


class Checkpointed(nn.Module):
    """Blocks with dropout whose activations are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        scores: Tensor = self.last(x)
        return scores


class Dropping(Checkpointed):
    """The same blocks without checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.last(x)
        return scores


def normalised() -> dict[str, nn.Module]:
    """The first bias has no effect: of its gradient, which is 0, float32 leaves rounding."""
    first = nn.Linear(FEATURES, 8)
    nn.init.zeros_(first.bias)
    return {"net": nn.Sequential(first, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))}


def bare() -> dict[str, nn.Module]:
    return {"net": nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))}


def frozen_backbone() -> dict[str, nn.Module]:
    body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU()).requires_grad_(False)
    return {"body": body.eval(), "net": nn.Linear(FEATURES, CLASSES)}


def checkpointed() -> dict[str, nn.Module]:
    return {"net": Checkpointed()}


def dropping() -> dict[str, nn.Module]:
    return {"net": Dropping()}


@dataclass(frozen=True)
class SoundProgram:
    """Trains ``net`` on what a frozen ``body``, if there is one, makes of the same batch again and again."""

    modules: Callable[[], dict[str, nn.Module]]
    device: torch.device = CPU
    period: int = 1

    @classmethod
    def of(cls, kind: type[nn.Module]) -> SoundProgram:
        return cls(lambda: {"net": kind()})

    def build(self, dtype: torch.dtype) -> Parts:
        torch.manual_seed(3)
        modules = self.modules()
        for module in modules.values():
            module.to(dtype)
        return Parts(modules, tuple(modules), (SGD(modules["net"].parameters(), lr=0.1, momentum=0.9),), dtype)

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        (optimizer,) = parts.optimizers
        while True:
            boundary.step_boundary()
            optimizer.zero_grad()
            scores = self._scores(parts, boundary)
            loss = scores.square().mean()
            loss.backward()
            optimizer.step()
            yield Step({"loss": loss.detach()}, {"scores": scores.detach()})

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        for module in parts.modules.values():
            module.eval()
        while True:
            boundary.step_boundary()
            with torch.no_grad():
                yield Step(outputs={"scores": self._scores(parts, boundary).clone()})

    def _scores(self, parts: Parts, boundary: StepBoundary) -> Tensor:
        x = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(1)).to(parts.dtype)
        if "body" in parts.modules:
            with torch.no_grad():
                x = boundary.boundary_call(parts.modules["body"], x)
        scores: Tensor = boundary.boundary_call(parts.modules["net"], x)
        return scores
