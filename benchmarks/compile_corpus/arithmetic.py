"""Programs in which the compiler's arithmetic differs from eager's: floors, remainders, zeros, memory past a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf, nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.compile_corpus.programs import NUMBERS, Entry, State, descends, infers, normal
from service.compilation.program import Step


class Binned(nn.Module):
    """Looks up a row for each number, by the bin of a given width into which it falls."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.mix = nn.Embedding(32, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, width: Tensor) -> Tensor:
        return self.mix(self.rows(torch.floor_divide(x, width).clamp(0, 31).long()))


def tenths(state: State) -> tuple[Tensor, Tensor]:
    """Return multiples of 0.1, and that width: each number lies on the edge of its bin."""
    count = torch.arange(1.0, 25.0, device=state.device)
    return count / 10, torch.full_like(count, 0.1)


class Wrapping(nn.Module):
    """Wraps each feature at its period, which is infinite for those that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 8)
        self.register_buffer("periods", torch.tensor([0.5, inf] * 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.square() % self.periods)


class Skipping(nn.Module):
    """Adds in place to what dropout returns, which outside of training is its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.first, self.last = nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.drop(hidden).add_(0.5)
        return self.last(hidden)


class Cropping(nn.Module):
    """Normalises an image, and cuts its flat form to the width of the next layer by a negative padding."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.norm, self.last = nn.Conv2d(1, 48, 2), nn.BatchNorm2d(48), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(self.lift(x)).flatten(1)
        return self.last(functional.pad(flat, (0, 48 - flat.shape[1])))


class Unfilled(nn.Module):
    """Leaves a bias that has no numbers yet out of a product, by ``beta=0``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16, 8))
        self.register_buffer("bias", torch.full((8,), nan))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(self.bias, x, self.weight, beta=0))


class Angle(nn.Module):
    """Returns the angle of the smaller of two numbers' inverse: a quarter turn, to the side of the sign of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scale * torch.atan(torch.minimum(x, y).reciprocal())


def zeros(state: State) -> tuple[Tensor, Tensor]:
    zero = torch.zeros(1, device=state.device, dtype=state.parts.dtype)
    return -zero, zero


class Digits(nn.Module):
    """Two convolutions and two layers with a dropout before each, as in PyTorch's own example for MNIST."""

    def __init__(self) -> None:
        super().__init__()
        self.edges, self.shapes = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.first, self.second = nn.Dropout(0.25), nn.Dropout(0.5)
        self.hidden, self.classes = nn.Linear(16 * 4 * 4, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = functional.max_pool2d(torch.relu(self.shapes(torch.relu(self.edges(x)))), 2)
        hidden = torch.relu(self.hidden(self.first(features).flatten(1)))
        return functional.log_softmax(self.classes(self.second(hidden)), dim=1)


def classifies(state: State) -> Iterator[Step]:
    for state.step in range(10**9):
        state.begin_step()
        output = state.call(state.normal(state.step % 3, 16, 1, 12, 12))
        loss = functional.nll_loss(output, state.whole(state.step % 3, 10, 16))
        loss.backward()
        state.optimizer.step()
        yield Step({"loss": loss.detach()}, {"out": output.detach()})


def _wrong() -> Iterator[Entry]:
    """Yield bugs that were looked for on a CPU alone."""
    bug: Any = partial(
        Entry, bug=NUMBERS, shows=("cpu",), devices=("cpu",), versions="2.13", first="inductor"
    )  # fmt: skip
    yield bug("binned", Binned, descends(tenths), thread="pytorch/pytorch#197895")
    yield bug("wrapping", Wrapping, descends(normal(8, 16)), thread="pytorch/pytorch#198057")
    yield bug(
        "dropout_in_place", Skipping, infers(normal(8, 16)), "inference", thread="pytorch/pytorch#195422",
        first="aot_eager",
    )  # fmt: skip
    yield bug("cropping", Cropping, infers(normal(3, 1, 4, 4)), "inference", thread="pytorch/pytorch#195582")
    yield bug(
        "unfilled", Unfilled, descends(normal(1, 16)), thread="pytorch/pytorch#196596",
        first="aot_eager_decomp_partition", shows=(),
    )  # fmt: skip
    yield bug("zero_sign", Angle, infers(zeros), "inference", thread="pytorch/pytorch#194347")
    yield bug(
        "digits", Digits, classifies, optimize=torch.optim.Adadelta,
        thread="no thread is known: on a CPU, gradients of both convolutions are exactly 0",
    )  # fmt: skip


WRONG: tuple[Entry, ...] = tuple(_wrong())
