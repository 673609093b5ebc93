"""Defines a program of the corpus: modules, and a loop over them in training or inference."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from service.compilation.program import Parts, Step
from service.jobs.spec.compile import Phase, Tolerance
from service.parallel.boundary import StepBoundary

NUMBERS, LIFETIME, CAPTURE, ERROR = "numbers", "lifetime", "capture", "error"
"""Kinds of bugs: other results; memory that replays overwrite; nothing compiled, or without end; an error."""


@dataclass
class State:
    """The data of a loop: its parts, and its position."""

    parts: Parts
    boundary: StepBoundary
    device: torch.device
    autocast: bool
    step: int = 0
    kept: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.parts.modules[name]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.parts.optimizers[0]

    def mark(self) -> None:
        self.boundary.step_boundary()

    def begin_step(self) -> None:
        """Mark a step, and drop the gradients of the one before."""
        self.mark()
        self.optimizer.zero_grad()

    def descend(self, loss: Tensor) -> Step:
        """Step along the gradients of a loss; return it."""
        loss.backward()
        self.optimizer.step()
        return Step({"loss": loss.detach()})

    def call(self, *inputs: Any, module: str = "net", **named: Any) -> Any:
        with self.precision():
            return self.boundary.boundary_call(self.parts.modules[module], *inputs, **named)

    def precision(self) -> AbstractContextManager[Any]:
        """Return bf16 if the program wants it; its reference runs in float64, which autocast leaves alone."""
        wanted = self.autocast and self.parts.dtype is torch.float32
        return torch.autocast(self.device.type, torch.bfloat16) if wanted else nullcontext()

    def normal(self, seed: int, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, self.parts.dtype)

    def whole(self, seed: int, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(self.device)


Loop = Callable[[State], Iterator[Step]]
Inputs = Callable[[State], tuple[Any, ...]]
Make = Callable[[], nn.Module | Mapping[str, nn.Module]]


@dataclass(frozen=True)
class Entry:
    """A program of the corpus. ``bug`` is empty for a sound one; else its kind, with a ``thread`` or a sentence about
    it, the devices where it ``shows`` in plain torch, the ``devices`` it was looked for on, and the ``versions`` of
    torch on which it was seen.
    ``apart``: each module has an optimizer of its own. ``unsound``: devices and versions, as "cpu 2.11", for which
    torch itself compiles a sound program to another. ``first``: the first rung that shows a bug on a CPU, if that is
    neither the lowest one nor, for what replays do to memory, the rehearsal.
    """

    name: str
    make: Make
    loop: Loop
    phase: Phase = "train"
    bug: str = ""
    thread: str = ""
    shows: tuple[str, ...] = ()
    versions: str = "2.11, 2.13, 2.14"
    compiled: tuple[str, ...] = ()
    autocast: bool = False
    period: int = 1
    kept: tuple[str, ...] = ()
    optimize: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    before: Callable[[], AbstractContextManager[Any]] = nullcontext
    apart: bool = False
    fast: bool = False
    unsound: tuple[str, ...] = ()
    first: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")

    def is_wrong(self, device: str, version: str) -> bool:
        """Return whether there is anything to catch, with this ``version`` of torch (its first two numbers)."""
        if not self.bug:
            return f"{device} {version}" in self.unsound
        return version in self.versions and device in self.devices

    @property
    def rung(self) -> str:
        """The first rung of the ladder that stops the check of a program with a bug, on a CPU."""
        return self.first or ("reduce-overhead" if self.bug == LIFETIME else "eager")

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(absolute=1e-3, ratio=3) if self.autocast else Tolerance()

    def program(self, device: torch.device) -> CorpusProgram:
        return CorpusProgram(self, device)


@dataclass(frozen=True)
class CorpusProgram:
    """An entry as the compile check takes programs."""

    entry: Entry
    device: torch.device

    @property
    def period(self) -> int:
        return self.entry.period

    def build(self, dtype: torch.dtype) -> Parts:
        torch.manual_seed(zlib.crc32(self.entry.name.encode()))
        made = self.entry.make()
        modules = {"net": made} if isinstance(made, nn.Module) else dict(made)
        for module in modules.values():
            module.to(self.device, dtype)
        of_each = [[each for each in module.parameters() if each.requires_grad] for module in modules.values()]
        groups = of_each if self.entry.apart else [list(dict.fromkeys(each for own in of_each for each in own))]
        optimize = self.entry.optimize or (lambda parameters: torch.optim.SGD(parameters, lr=0.05))
        optimizers = tuple(optimize(own) for own in groups if own) if self.entry.phase == "train" else ()
        return Parts(modules, self.entry.compiled or tuple(modules), optimizers, dtype, self.entry.kept)

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        yield from self.entry.loop(State(parts, boundary, self.device, self.entry.autocast))

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        for module in parts.modules.values():
            module.eval()
        steps = self.entry.loop(State(parts, boundary, self.device, self.entry.autocast))
        while True:
            with torch.no_grad():
                step = next(steps)
            yield step


def tensor_of(output: Any) -> Tensor:
    """Return the first tensor of a module's output: that of Hugging Face models is named."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state", "sample"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return tensor_of(output[0])


def squares(state: State, output: Tensor) -> Tensor:
    """Return the mean squared distance from a fixed target."""
    return (output.to(state.parts.dtype) - state.normal(7, *output.shape)).square().mean()


def normal(*shape: int) -> Inputs:
    return lambda state: (state.normal(state.step % 3, *shape),)


def whole(high: int, *shape: int) -> Inputs:
    return lambda state: (state.whole(state.step % 3, high, *shape),)


def descends(inputs: Inputs, clip: float = 0.0) -> Loop:
    """Return a loop that minimises squared errors of ``net``."""

    def loop(state: State) -> Iterator[Step]:
        while True:
            state.begin_step()
            output = tensor_of(state.call(*inputs(state)))
            loss = squares(state, output)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(state["net"].parameters(), clip)
            state.optimizer.step()
            state.step += 1
            yield Step({"loss": loss.detach()}, {"out": output.detach()})

    return loop


def infers(inputs: Inputs) -> Loop:
    def loop(state: State) -> Iterator[Step]:
        while True:
            state.mark()
            output = tensor_of(state.call(*inputs(state)))
            state.step += 1
            yield Step(outputs={"out": output.clone()})

    return loop


class Mlp(nn.Module):
    def __init__(self, inside: int = 16, hidden: int = 32, outside: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inside, hidden), nn.Linear(hidden, outside)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))
