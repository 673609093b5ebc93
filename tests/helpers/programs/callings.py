"""Two modules, of which one is called in another way than ``module(...)``, and so never compiled; or rightly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn
from torch.optim import SGD

from service.compilation.program import Parts, Step
from service.parallel.boundary import StepBoundary

CPU = torch.device("cpu")
FEATURES, ROWS = 4, 5


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))


class Lens(nn.Module):
    """``score`` computes what ``forward`` does; ``scored`` goes by way of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x)

    def score(self, x: Tensor) -> Tensor:
        return self.head(x.square())

    def scored(self, x: Tensor) -> Tensor:
        return self(x)


class Both(nn.Module):
    """``lens`` is a part of it: called from its forward, it is compiled with it."""

    def __init__(self, lens: Lens) -> None:
        super().__init__()
        self.encoder, self.lens = Encoder(), lens

    def forward(self, x: Tensor) -> Tensor:
        return self.lens.score(self.encoder(x))


@dataclass
class Modules:
    parts: Parts
    boundary: StepBoundary

    @property
    def lens(self) -> Lens:
        found = self.parts.modules["lens"]
        assert isinstance(found, Lens)
        return found

    def encoded(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.boundary.boundary_call(self.parts.modules["encoder"], x)
        return encoded


Scoring = Callable[[Modules, Tensor], Tensor]


def by_method(modules: Modules, x: Tensor) -> Tensor:
    return modules.lens.score(modules.encoded(x))


def by_forward(modules: Modules, x: Tensor) -> Tensor:
    return modules.lens.forward(modules.encoded(x))


def by_boundary(modules: Modules, x: Tensor) -> Tensor:
    scores: Tensor = modules.boundary.boundary_call(modules.lens.score, modules.encoded(x))
    return scores


def not_at_all(modules: Modules, x: Tensor) -> Tensor:
    return modules.encoded(x)


def by_itself(modules: Modules, x: Tensor) -> Tensor:
    return modules.lens(modules.encoded(x))


def by_way_of_itself(modules: Modules, x: Tensor) -> Tensor:
    return modules.lens.scored(modules.encoded(x))


def both_ways(modules: Modules, x: Tensor) -> Tensor:
    encoded = modules.encoded(x)
    with torch.no_grad():
        told = modules.lens.score(encoded).mean()
    return modules.lens(encoded) + 0 * told


def within_another(modules: Modules, x: Tensor) -> Tensor:
    scores: Tensor = modules.boundary.boundary_call(modules.parts.modules["encoder"], x)
    return scores


def only_in_training(modules: Modules, x: Tensor) -> Tensor:
    return (by_itself if torch.is_grad_enabled() else by_method)(modules, x)


@dataclass(frozen=True)
class Calling:
    """``scores`` makes the forward of each step. ``nested``: the encoder holds the lens, and calls it."""

    scores: Scoring
    nested: bool = False
    device: torch.device = CPU
    period: int = 1

    def build(self, dtype: torch.dtype) -> Parts:
        torch.manual_seed(3)
        lens = Lens()
        modules = nn.ModuleDict({"encoder": Both(lens) if self.nested else Encoder(), "lens": lens}).to(dtype)
        trained = modules if self.scores is not not_at_all else modules["encoder"]
        optimizer = SGD(trained.parameters(), lr=0.1, foreach=False)
        return Parts(dict(modules.items()), ("encoder", "lens"), (optimizer,), dtype)

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        for number in count():
            boundary.step_boundary()
            parts.optimizers[0].zero_grad()
            loss = self.scores(Modules(parts, boundary), _batch(number, parts.dtype)).square().mean()
            loss.backward()
            parts.optimizers[0].step()
            yield Step({"loss": loss.detach().clone()})

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        for number in count():
            boundary.step_boundary()
            with torch.no_grad():
                yield Step(outputs={"scores": self.scores(Modules(parts, boundary), _batch(number, parts.dtype))})


def _batch(number: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(number)).to(dtype)
