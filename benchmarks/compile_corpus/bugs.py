"""Programs whose compiled run is another one than the uncompiled: by a fault of the compiler, or by one of theirs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from benchmarks.compile_corpus.programs import (
    CAPTURE,
    ERROR,
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
        state.mark()
        state.optimizer.zero_grad()
        *halves, _ = state.call(state.normal(1, 8, 16), module="encoder")
        output = state.call(sum(halves), module="decoder")
        loss = squares(state, output)
        loss.backward()
        state.optimizer.step()
        yield Step({"loss": loss.detach()})


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
        state.mark()
        state.optimizer.zero_grad()
        output = state.call(state.normal(1, 8, 16))
        loss = squares(state, output) * (1 + len(state["net"].said))
        state["net"].said.clear()
        loss.backward()
        state.optimizer.step()
        yield Step({"loss": loss.detach()})


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


class Ever(Mlp):
    """Reads something of itself that is another in each call: each time another graph."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.seen, self.count, self.name = what, [], 0, "0"

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape[0])
        self.count += 1
        if self.what == "length":
            return super().forward(x) * min(1.0, len(self.seen) / 100)
        if self.what == "name":
            self.name = str(self.count)
            return super().forward(x) * (2 if self.name == "3" else 1)
        return super().forward(x) * (1 + 0.01 * len(str(10**self.count)))


class Methods(Mlp):
    def score(self, x: Tensor) -> Tensor:
        return super().forward(x)


def by_method(name: str, phase: str = "train") -> Callable[[State], Iterator[Step]]:
    def loop(state: State) -> Iterator[Step]:
        while True:
            state.mark()
            if phase == "train":
                state.optimizer.zero_grad()
            output = getattr(state["net"], name)(state.normal(1, 8, 16))
            if phase == "train":
                squares(state, output).backward()
                state.optimizer.step()
            yield Step(outputs={"out": output.detach().clone()})

    return loop


class Recurrent(nn.Module):
    """One recurrent layer of torch, and nothing else that could be compiled."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Disabled(Mlp):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Branching(Mlp):
    """Has a fast way of its own for when it is compiled, which is another one."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(self.change(hidden) if torch.compiler.is_compiling() else hidden)


def _slope(x: Tensor) -> Tensor:
    return x + 0.05 * (x - x.detach())


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda x: x * 1.01,
    "slope": _slope,
    "half": lambda x: x.to(torch.float16).to(x.dtype),
    "shifted": lambda x: x + 1e-3,
    "rolled": lambda x: x.roll(1, -1),
    "cut": lambda x: x.detach(),
    "clipped": lambda x: x.clamp(-0.7, 0.7),
    "masked": lambda x: x * (torch.arange(x.shape[-1], device=x.device) != 3),
    "dropped": lambda x: nn.functional.dropout(x, 0.1, True),
    "mixed": lambda x: 0.99 * x + 0.01 * x.mean(0, keepdim=True),
}


@torch.library.custom_op("corpus::rows", mutates_args=())
def rows(x: Tensor) -> Tensor:
    return x.sum(-1)


@rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lift(x)
        return hidden * rows(hidden).unsqueeze(-1)


def hooks_late(kind: str) -> Callable[[State], Iterator[Step]]:
    """Return a loop that puts a hook on a part of its module after two steps."""

    def loop(state: State) -> Iterator[Step]:
        hooked: Any = None
        for state.step in range(10**9):
            state.mark()
            if state.step % 6 == 2:
                part = state["net"].first
                if kind == "after":
                    hooked = part.register_forward_hook(lambda _module, _given, output: output * 2)
                else:
                    hooked = part.register_forward_pre_hook(lambda _module, given: (given[0] * 2,))
            if state.step % 6 == 0 and hooked is not None:
                hooked.remove()
            yield Step(outputs={"out": state.call(state.normal(1, 8, 16)).clone()})

    return loop


def second_order(kind: str) -> Callable[[State], Iterator[Step]]:
    def loop(state: State) -> Iterator[Step]:
        while True:
            state.mark()
            state.optimizer.zero_grad()
            x = state.normal(1, 8, 16).requires_grad_()
            output = state.call(x)
            own = list(state["net"].parameters())
            if kind == "penalty":
                (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
                loss = (slope.norm(dim=1) - 1).square().mean()
            else:
                slopes = torch.autograd.grad(squares(state, output), own, create_graph=True)
                loss = sum((each.square().sum() for each in slopes), squares(state, output))
            loss.backward()
            state.optimizer.step()
            yield Step({"loss": loss.detach()})

    return loop


def _compiler_bugs() -> Iterator[Entry]:
    pooled = {1: (8, 2, 6), 2: (8, 2, 6, 6), 3: (4, 2, 6, 6, 6)}
    for rank, kernel, stride in ((2, 3, 2), (2, 5, 3), (3, 3, 2), (1, 3, 2)):
        yield Entry(
            f"pool_{rank}d_{kernel}_{stride}",
            partial(Pooled, rank, kernel, stride),
            descends(normal(*pooled[rank])),
            bug=NUMBERS,
            thread="pytorch/pytorch#198119",
            shows=("cpu", "cuda") if rank > 1 else (),
        )
    for way in ("max", "both", "silu"):
        yield Entry(
            f"clamp_{way}", partial(Bounded, way), descends(bounded), bug=NUMBERS, period=4,
            thread="pytorch/pytorch#194976", shows=CPU_AND_CUDA,
        )  # fmt: skip
    for parts in (2, 4):
        yield Entry(
            f"halves_{parts}", lambda parts=parts: {"encoder": Halves(parts), "decoder": nn.Linear(32 // parts, 8)},
            adds_halves, bug=NUMBERS, thread="pytorch/pytorch#195357", shows=CPU_AND_CUDA,
        )  # fmt: skip
    for kind in (list, dict):
        yield Entry(
            f"log_{kind.__name__}", partial(logging, kind), weighs_by_log, bug=NUMBERS,
            thread="pytorch/pytorch#197896", shows=CPU_AND_CUDA, fast=kind is list,
        )  # fmt: skip
    for steps in (4, 6):
        yield Entry(
            f"item_{steps}", partial(Adapting, steps), infers(X), "inference", NUMBERS,
            "pytorch/pytorch#185382", CPU_AND_CUDA,
        )  # fmt: skip
    for of_tail in (True, False):
        yield Entry(
            f"ring_{'tail' if of_tail else 'middle'}", partial(Ring, of_tail), infers(ring), "inference", NUMBERS,
            "pytorch/pytorch#198095", CPU_AND_CUDA, fast=of_tail,
        )  # fmt: skip
    for value in (2, 5):
        yield Entry(
            f"bits_{value}", partial(Bits, value), infers(words), "inference", NUMBERS,
            "pytorch/pytorch#198101", CPU_AND_CUDA,
        )  # fmt: skip
    yield Entry(
        "shadowed", lambda: {"net": Wrap(), "adapter": nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))}, shadows,
        "inference", NUMBERS, "pytorch/pytorch#197859", CPU_AND_CUDA, compiled=("net",), period=2, fast=True,
    )  # fmt: skip
    yield Entry("evicted", Cached, evicts, "inference", NUMBERS, "pytorch/pytorch#198189", CPU_AND_CUDA)
    yield Entry(
        "budget", Dropped, descends(normal(32, 64)), bug=NUMBERS, thread="pytorch/pytorch#190758",
        shows=CPU_AND_CUDA, before=little_memory,
    )  # fmt: skip
    for way in ("exp", "square"):
        yield Entry(
            f"level_{way}", partial(Levelled, way), descends(X), bug=NUMBERS, thread="pytorch/pytorch#197039",
            shows=CPU_AND_CUDA, fast=way == "exp",
        )  # fmt: skip


def _own_bugs() -> Iterator[Entry]:
    for what in ("length", "name", "digits"):
        yield Entry(
            f"ever_{what}", partial(Ever, what), descends(X), bug=CAPTURE, thread="pytorch/pytorch#128319",
            fast=what == "length",
        )  # fmt: skip
    for name in ("score", "forward"):
        for phase in ("train", "inference"):
            yield Entry(
                f"calls_{name}_{phase}", Methods, by_method(name, phase), phase, CAPTURE,
                "only module(...) runs what module.compile() has compiled", fast=name == "score" and phase == "train",
            )  # fmt: skip
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for phase in ("train", "inference"):
            loop = (descends if phase == "train" else infers)(normal(4, 8, 16))
            yield Entry(f"{kind.__name__.lower()}_{phase}", partial(Recurrent, kind), loop, phase, CAPTURE,
                        "Dynamo leaves recurrent layers as they are (allow_rnn)")  # fmt: skip
    yield Entry("disabled", Disabled, descends(X), bug=CAPTURE, thread="a decorator left from debugging")
    yield Entry("forced_eager", Mlp, descends(X), bug=CAPTURE, thread="a stance left from debugging",
                before=lambda: torch.compiler.set_stance("force_eager"))  # fmt: skip
    for name, change in CHANGES.items():
        yield Entry(
            f"fast_way_{name}", partial(Branching, change), descends(X), bug=NUMBERS,
            thread="another way under torch.compiler.is_compiling()", shows=CPU_AND_CUDA, fast=name == "slope",
        )  # fmt: skip
    yield Entry("wrong_fake", Custom, infers(X), "inference", ERROR,
                "an operator whose fake has another shape", CPU_AND_CUDA)  # fmt: skip
    for kind in ("after", "before"):
        yield Entry(f"hook_{kind}", Mlp, hooks_late(kind), "inference", NUMBERS,
                    "hooks put on later are not guarded on (skip_nnmodule_hook_guards)", CPU_AND_CUDA,
                    period=6)  # fmt: skip
    for kind in ("penalty", "meta"):
        yield Entry(f"second_order_{kind}", Mlp, second_order(kind), bug=ERROR,
                    thread="AOTAutograd has no double backward", shows=CPU_AND_CUDA)  # fmt: skip


BUGS: tuple[Entry, ...] = (*_compiler_bugs(), *_own_bugs())
