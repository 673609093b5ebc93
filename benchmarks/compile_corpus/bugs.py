"""Programs that the compiler changes, by a fault of its own."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from benchmarks.compile_corpus.programs import (
    NUMBERS,
    Entry,
    Mlp,
    State,
    descends,
    infers,
    normal,
    squares,
)
from service.compilation.program import Step

CPU_AND_CUDA = ("cpu", "cuda")
X = normal(8, 16)


class Pooled(nn.Module):
    """Its last window hangs over the edge."""

    def __init__(self, rank: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.lift = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](2, 4, 3, padding=1)
        self.pool = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[rank - 1](kernel, stride, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(torch.tanh(self.lift(x)))


class Bounded(nn.Module):
    """Clips at a plain float that changes from call to call."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.mix = way, nn.Linear(16, 16)

    def forward(self, x: Tensor, bound: float) -> Tensor:
        left, right = self.mix(x).chunk(2, dim=-1)
        if self.way == "max":
            return torch.nn.functional.silu(left).clamp(max=bound) * right.clamp(-bound, bound)
        if self.way == "both":
            return left.clamp(-bound, bound) * right
        return torch.nn.functional.silu(left).clamp(max=bound) * right


def bounded(state: State) -> tuple[Any, ...]:
    return state.normal(1, 8, 16), (0.1, 0.4, 0.8, 0.25)[state.step % 4]


class Halves(nn.Module):
    """Gives two halves of a tensor, and that tensor detached."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts, self.lift = parts, nn.Linear(16, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.lift(x))
        width = hidden.shape[-1] // self.parts
        return (*(hidden[:, start : start + width] for start in range(0, hidden.shape[-1], width)), hidden.detach())


def adds_halves(state: State) -> Iterator[Step]:
    while True:
        state.begin_step()
        *halves, _ = state.call(state.normal(1, 8, 16), module="encoder")
        output = state.call(sum(halves), module="decoder")
        loss = squares(state, output)
        yield state.descend(loss)


def logging(kind: type) -> nn.Module:
    """Return a module that makes a class in each forward, whose method writes into what it closes over."""
    log: Any = kind()

    class Meter:
        def note(self, width: int) -> None:
            if isinstance(log, list):
                log.append(width)
            else:
                log[len(log)] = width

    class Logged(Mlp):
        said = log

        def forward(self, x: Tensor) -> Tensor:
            Meter().note(x.shape[-1])
            return super().forward(x)

    return Logged()


def weighs_by_log(state: State) -> Iterator[Step]:
    while True:
        state.begin_step()
        output = state.call(state.normal(1, 8, 16))
        loss = squares(state, output) * (1 + len(state["net"].said))
        state["net"].said.clear()
        yield state.descend(loss)


class Adapting(nn.Module):
    """Takes some steps of a hand-written optimizer on a fast weight, with the count of steps read by item()."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.base = steps, nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("first", torch.zeros(16, 16))
        self.register_buffer("second", torch.zeros(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        fast = self.base.weight.clone()
        self.count.zero_()
        self.first.zero_()
        self.second.zero_()
        for _ in range(self.steps):
            slope = (x @ fast.t() - x).t() @ x / 8
            self.count.add_(1)
            self.first.mul_(0.9).add_(slope, alpha=0.1)
            self.second.mul_(0.99).addcmul_(slope, slope, value=0.01)
            times = self.count.item()
            spread = (self.second / (1 - 0.99**times)).sqrt().add_(1e-3)
            fast.addcdiv_(self.first, spread, value=-0.01 / (1 - 0.9**times))
        return x @ fast.t()


class Ring(nn.Module):
    """Shifts a ring in place and returns a view of another view of it."""

    def __init__(self, of_tail: bool) -> None:
        super().__init__()
        self.of_tail = of_tail
        self.gain = nn.Parameter(torch.full((), 3.0), requires_grad=False)

    def forward(self, ring: Tensor, tail: Tensor) -> Tensor:
        ring.add_(self.gain)
        return tail[0] if self.of_tail else tail[1:3]


def ring(state: State) -> tuple[Tensor, Tensor]:
    frames = state.normal(4, 5, 16)
    return frames, frames[1:]


class Bits(nn.Module):
    """Reads the bits of a table, and then writes into it."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value, self.unused = value, nn.Linear(2, 2)

    def forward(self, words: Tensor) -> Tensor:
        halves = words.view(torch.int32) * 2
        halves.sub_(-4)
        words[:, 2:5] = self.value
        return halves.view(torch.int64)


def words(state: State) -> tuple[Tensor]:
    return (torch.arange(-12, 12, dtype=torch.int64, device=state.device).reshape(4, 6),)


class Wrap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def shadows(state: State) -> Iterator[Step]:
    while True:
        state.mark()
        net = state["net"]
        if state.step % 2:
            net.__dict__["body"] = state["adapter"]
        else:
            net.__dict__.pop("body", None)
        state.step += 1
        yield Step(outputs={"out": state.call(state.normal(1, 8, 16)).clone()})


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.held = nn.Linear(16, 8), OrderedDict(a=1.0, b=2.0)

    def forward(self, x: Tensor, key: str) -> Tensor:
        if key in self.held:
            self.held.move_to_end(key)
        return self.body(x)


def evicts(state: State) -> Iterator[Step]:
    while True:
        state.mark()
        held = state["net"].held
        output = state.call(state.normal(1, 8, 16), "a")
        held["c"] = 3.0
        held.popitem(last=False)
        total = sum(held.values())
        held.clear()
        held.update(a=1.0, b=2.0)
        yield Step(outputs={"out": output * total})


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.relu(self.first(x)), 0.5, training=True)
        return self.last(nn.functional.dropout(torch.relu(self.inner(hidden)), 0.5, training=True))


def little_memory() -> Any:
    return torch._functorch.config.patch(activation_memory_budget=0.0)


class Levelled(nn.Module):
    """Reads a running level, and renews it in place before it returns."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(16, 32), nn.Linear(32, 8)
        self.register_buffer("level", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scaled = torch.exp(self.level) if self.way == "exp" else 1 + self.level.square()
        output = self.last(torch.tanh(hidden) * scaled)
        with torch.no_grad():
            self.level.mul_(0.5).add_(hidden.mean(0))
        return output


class Jittered(Mlp):
    """Scales its inputs by what Python draws: 64 bits, of which generated code reads the lower 32 as a number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * random.uniform(0.5, 1.5))


def _bugs_of_training() -> Iterator[Entry]:
    pooled = {1: (8, 2, 6), 2: (8, 2, 6, 6), 3: (4, 2, 6, 6, 6)}
    for rank, kernel, stride in ((2, 3, 2), (2, 5, 3), (3, 3, 2), (1, 3, 2)):
        yield Entry(
            f"pool_{rank}d_{kernel}_{stride}",
            partial(Pooled, rank, kernel, stride),
            descends(normal(*pooled[rank])),
            bug=NUMBERS,
            thread="pytorch/pytorch#198119",
            shows=("cpu", "cuda") if rank > 1 else (),
            first="inductor",
        )
    for way in ("max", "both", "silu"):
        yield Entry(
            f"clamp_{way}", partial(Bounded, way), descends(bounded), bug=NUMBERS, period=4,
            thread="pytorch/pytorch#194976", shows=CPU_AND_CUDA, first="inductor",
        )  # fmt: skip
    for parts in (2, 4):
        yield Entry(
            f"halves_{parts}", lambda parts=parts: {"encoder": Halves(parts), "decoder": nn.Linear(32 // parts, 8)},
            adds_halves, bug=NUMBERS, thread="pytorch/pytorch#195357", shows=CPU_AND_CUDA,
            first="inductor",
        )  # fmt: skip
    for kind in (list, dict):
        yield Entry(
            f"log_{kind.__name__}", partial(logging, kind), weighs_by_log, bug=NUMBERS,
            thread="pytorch/pytorch#197896", shows=CPU_AND_CUDA, fast=kind is list,
        )  # fmt: skip
    yield Entry(
        "budget", Dropped, descends(normal(32, 64)), bug=NUMBERS, thread="pytorch/pytorch#190758",
        shows=CPU_AND_CUDA, before=little_memory, first="aot_eager",
    )  # fmt: skip
    for way in ("exp", "square"):
        yield Entry(
            f"level_{way}", partial(Levelled, way), descends(X), bug=NUMBERS, thread="pytorch/pytorch#197039",
            shows=CPU_AND_CUDA, fast=way == "exp", first="aot_eager",
        )  # fmt: skip


def _bugs_of_inference() -> Iterator[Entry]:
    for steps in (4, 6):
        yield Entry(
            f"item_{steps}", partial(Adapting, steps), infers(X), "inference", NUMBERS,
            "pytorch/pytorch#185382", CPU_AND_CUDA,
        )  # fmt: skip
    for of_tail in (True, False):
        yield Entry(
            f"ring_{'tail' if of_tail else 'middle'}", partial(Ring, of_tail), infers(ring), "inference", NUMBERS,
            "pytorch/pytorch#198095", CPU_AND_CUDA, fast=of_tail, first="aot_eager",
        )  # fmt: skip
    for value in (2, 5):
        yield Entry(
            f"bits_{value}", partial(Bits, value), infers(words), "inference", NUMBERS,
            "pytorch/pytorch#198101", CPU_AND_CUDA, first="inductor",
        )  # fmt: skip
    yield Entry(
        "shadowed", lambda: {"net": Wrap(), "adapter": nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))}, shadows,
        "inference", NUMBERS, "pytorch/pytorch#197859", CPU_AND_CUDA, compiled=("net",), period=2, fast=True,
    )  # fmt: skip
    yield Entry("evicted", Cached, evicts, "inference", NUMBERS, "pytorch/pytorch#198189", CPU_AND_CUDA)
    for phase, loop in (("train", descends), ("inference", infers)):
        yield Entry(
            f"jittered_{phase}", Jittered, loop(X), phase, NUMBERS, "pytorch/pytorch#198187", ("cpu",), "2.13",
            first="inductor", devices=("cpu",),
        )  # fmt: skip


COMPILER_BUGS: tuple[Entry, ...] = (*_bugs_of_training(), *_bugs_of_inference())
