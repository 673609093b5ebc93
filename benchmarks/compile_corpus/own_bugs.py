"""Programs whose compiled run differs by a fault of their own, or by a limit of compilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.compile_corpus.bugs import CPU_AND_CUDA, X
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


class Ever(Mlp):
    """Reads an attribute that differs in each call, so that each call makes another graph."""

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
    """Has a fast path for compiled runs, which computes something else."""

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
            state.begin_step()
            x = state.normal(1, 8, 16).requires_grad_()
            output = state.call(x)
            own = list(state["net"].parameters())
            if kind == "penalty":
                (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
                loss = (slope.norm(dim=1) - 1).square().mean()
            else:
                slopes = torch.autograd.grad(squares(state, output), own, create_graph=True)
                loss = sum((each.square().sum() for each in slopes), squares(state, output))
            yield state.descend(loss)

    return loop


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
                    thread="AOTAutograd has no double backward", shows=CPU_AND_CUDA, first="aot_eager")  # fmt: skip


OWN_BUGS: tuple[Entry, ...] = tuple(_own_bugs())
