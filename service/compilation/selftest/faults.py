"""Defines small programs with one fault each, for the detector that must find it; and one without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from service.compilation.program import Parts, Step
from service.compilation.rungs import REHEARSAL, RUNGS, Rung
from service.compilation.selftest import backends
from service.compilation.verdicts import Verdict
from service.jobs.spec.compile import Phase
from service.parallel.boundary import StepBoundary
from service.torch_internals.table import internal

FEATURES, ROWS, LATE = 4, 5, 3
_TIMES = count()


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.late = nn.Linear(FEATURES, 8), nn.Linear(8, FEATURES), False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x)).square()
        scores: Tensor = self.head(-hidden if self.late else hidden)
        return scores


class Storing(Scorer):
    """Leaves an intermediate of its last forward in an attribute."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x).detach()
        return super().forward(x)


class Keeping(Storing):
    """Keeps its hidden layer in an attribute, and the mean of that in a buffer."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        assert self.hidden is not None
        self.level.copy_(self.hidden.mean(0))
        return scores


class Choosing(Scorer):
    """Returns the number of the highest score, from 1 on, which a small change of parameters does not alter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1) + 1


class Disabled(Scorer):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@dataclass
class FaultyLoop:
    """Holds a program's data in a step."""

    parts: Parts
    boundary: StepBoundary
    number: int = 0
    past: list[Tensor] = field(default_factory=list)

    def batch(self, micro: int = 0, rows: int = ROWS) -> Tensor:
        generator = torch.Generator().manual_seed(10 * self.number + micro)
        return torch.randn(rows, FEATURES, generator=generator).to(self.parts.dtype)

    def score(self, x: Tensor) -> Tensor:
        scores: Tensor = self.boundary.boundary_call(self.parts.modules["scorer"], x)
        return scores

    def update(self, *losses: Callable[[], Tensor]) -> Step:
        """Add up the gradients of the losses, and step."""
        (optimizer,) = self.parts.optimizers
        optimizer.zero_grad()
        total = torch.zeros((), dtype=self.parts.dtype)
        for loss in losses:
            value = loss()
            value.backward()  # type: ignore[no-untyped-call]
            total += value.detach()
        optimizer.step()
        return Step({"loss": total})


def sound(loop: FaultyLoop) -> Step:
    loop.boundary.step_boundary()
    return loop.update(lambda: loop.score(loop.batch()).square().mean())


def calls_past_the_compiled_forward(loop: FaultyLoop) -> Step:
    loop.boundary.step_boundary()
    return loop.update(lambda: loop.parts.modules["scorer"].forward(loop.batch()).square().mean())


def holds(loop: FaultyLoop) -> Step:
    loop.boundary.step_boundary()
    loop.past.append(loop.score(loop.batch()).detach())
    return Step(outputs={"scores": torch.stack(loop.past[-3:]).sum(0)})


def reads_late(loop: FaultyLoop) -> Step:
    """Add the hidden layer that the module kept in the previous step."""
    loop.boundary.step_boundary()
    last: Any = loop.parts.modules["scorer"].hidden
    scores = loop.score(loop.batch())
    return Step(outputs={"scores": scores if last is None else scores + last.mean()})


def reads_unseen(loop: FaultyLoop) -> Step:
    """Return the choice of the previous step, for the same batch in every step, read without a torch function that is
    seen.
    """
    loop.boundary.step_boundary()
    chosen = loop.score(torch.ones(ROWS, FEATURES, dtype=loop.parts.dtype))
    last, loop.past = [*loop.past, chosen][0], [chosen]
    with internal("torch._C.DisableTorchFunction")():
        return Step(outputs={"chosen": last.clone()})


def marks_while_pending(loop: FaultyLoop) -> Step:
    """Mark a step by another loop's boundary, which knows nothing of this one's forwards."""
    other = StepBoundary(loop.parts.modules)

    def scored(micro: int) -> Tensor:
        other.step_boundary()
        return loop.score(loop.batch(micro)).square().mean()

    return loop.update(lambda: scored(0) + scored(1))


def accumulates_unmarked(loop: FaultyLoop) -> Step:
    return loop.update(*(lambda micro=micro: loop.score(loop.batch(micro)).square().mean() for micro in range(2)))


def calls_in_backward(loop: FaultyLoop) -> Step:
    def again(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            return gradient * loop.score(loop.batch(1)).detach().mean()

    def loss() -> Tensor:
        first = loop.score(loop.batch())
        first.register_hook(again)  # type: ignore[no-untyped-call]
        return loop.score(first.tanh()).square().mean()

    return loop.update(loss)


def grows(loop: FaultyLoop) -> Step:
    loop.boundary.step_boundary()
    return loop.update(lambda: loop.score(loop.batch(rows=2 + loop.number)).square().mean())


def changes_late(loop: FaultyLoop) -> Step:
    scorer: Any = loop.parts.modules["scorer"]
    scorer.late = loop.number >= LATE
    return sound(loop)


def repeating(shown: str) -> Callable[[FaultyLoop], Step]:
    """Return a step that trains on the same batch in every step, and yields one of its remains."""

    def step(loop: FaultyLoop) -> Step:
        scorer: Any = loop.parts.modules["scorer"]
        (optimizer,) = loop.parts.optimizers
        loop.boundary.step_boundary()
        optimizer.zero_grad()
        features = torch.ones(ROWS, FEATURES, dtype=loop.parts.dtype, requires_grad=True).square()
        features.retain_grad()
        scores = loop.score(features)
        scores.square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        left = {"scores": scores, "hidden": scorer.hidden, "level": scorer.level, "retained": features.grad}
        return Step(outputs={name: value.detach().clone() for name, value in left.items() if name == shown})

    return step


def scores_again(loop: FaultyLoop) -> Step:
    """Score the same batch in every step."""
    loop.boundary.step_boundary()
    return Step(outputs={"scores": loop.score(torch.ones(ROWS, FEATURES, dtype=loop.parts.dtype)).clone()})


def never_alike(loop: FaultyLoop) -> Step:
    """Return 2 % more than the previous time, for any program."""
    loop.boundary.step_boundary()
    return loop.update(lambda: loop.score(loop.batch()).square().mean() * (1 + 0.02 * next(_TIMES)))


@dataclass(frozen=True)
class FaultyProgram:
    step: Callable[[FaultyLoop], Step] = sound
    module: Callable[[], nn.Module] = Scorer
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    period: int = 1

    def build(self, dtype: torch.dtype) -> Parts:
        torch.manual_seed(3)
        scorer = self.module().to(dtype)
        return Parts({"scorer": scorer}, ("scorer",), (SGD(scorer.parameters(), lr=0.1, foreach=False),), dtype)

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        loop = FaultyLoop(parts, boundary)
        for loop.number in count():
            yield self.step(loop)

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        with torch.no_grad():
            yield from self.train(parts, boundary)


@dataclass(frozen=True)
class Fault:
    """``detector`` must report ``verdict`` with these ``words``."""

    name: str
    detector: str
    verdict: Verdict
    words: str
    program: FaultyProgram
    rung: Rung
    phase: Phase = "train"


FAULTS: tuple[Fault, ...] = (
    Fault("a compiler that crashes", "error", "fail_error", "planted", FaultyProgram(), Rung("x", backends.crashes)),
    Fault(
        "a forward that may not be compiled", "vacuous", "vacuous", "no graph was captured",
        FaultyProgram(module=Disabled), RUNGS["eager"],
    ),
    Fault(
        "a forward that is called past what was compiled", "uncalled", "vacuous", "scorer was never called compiled",
        FaultyProgram(calls_past_the_compiled_forward), RUNGS["eager"],
    ),
    Fault(
        "a compiler that loses gradients", "frozen", "frozen", "no gradient where eager has one", FaultyProgram(),
        Rung("x", backends.forgets_parameters, compiles_backward=False),
    ),
    Fault(
        "a compiler whose gradients are 5 % off", "parity", "fail_parity", "gradient", FaultyProgram(),
        Rung("x", backends.wrong_gradients),
    ),
    *(
        Fault(
            f"a stale {what}, where a batch repeats",
            "parity",
            "fail_parity",
            f"{named}iteration 1: is the value of iteration 0",
            FaultyProgram(repeating(shown), Keeping),
            Rung("x", backend),
        )
        for what, shown, named, backend in (
            ("output", "scores", "output scores, ", backends.stale_outputs),
            ("module attribute", "hidden", "output hidden, ", backends.stale_outputs),
            ("buffer", "level", "output level, ", backends.stale_outputs),
            ("gradient", "", "", backends.stale_gradients),
            ("retained gradient", "retained", "output retained, ", backends.stale_gradients),
        )
    ),
    Fault(
        "a stale output of inference, where a batch repeats", "parity", "fail_parity",
        "output scores, iteration 1: is the value of iteration 0", FaultyProgram(scores_again),
        Rung("x", backends.stale_outputs), "inference",
    ),
    Fault(
        "eager runs that never agree", "parity", "vacuous", "two eager runs differ", FaultyProgram(never_alike),
        RUNGS["eager"],
    ),
    Fault(
        "a module that changes after warm-up", "unstable", "unstable", "still compiling after warm-up",
        FaultyProgram(changes_late), RUNGS["eager"],
    ),
    Fault("a new shape in every step", "shapes", "unstable", "new shapes", FaultyProgram(grows), REHEARSAL),
    Fault(
        "a result held over a replay", "lifetime", "fail_lifetime", "held by FaultyLoop.past[", FaultyProgram(holds),
        REHEARSAL, "inference",
    ),
    Fault(
        "an intermediate that a module keeps, read a step later", "lifetime", "fail_lifetime", "held by scorer.hidden",
        FaultyProgram(reads_late, Storing), REHEARSAL, "inference",
    ),
    Fault(
        "stale memory with the right numbers in it", "unseen", "fail_lifetime",
        "with shuffled parameters output chosen, iteration ", FaultyProgram(reads_unseen, Choosing), REHEARSAL,
        "inference",
    ),
    Fault(
        "a step marked while a backward is pending", "lifetime", "fail_lifetime", "a step is marked at",
        FaultyProgram(marks_while_pending), REHEARSAL,
    ),
    Fault(
        "gradients accumulated over replays", "lifetime", "fail_lifetime",
        "gradients are accumulated or used over replays", FaultyProgram(accumulates_unmarked), REHEARSAL,
    ),
    Fault(
        "a call from within a backward", "lifetime", "fail_lifetime", "within a running backward",
        FaultyProgram(calls_in_backward), REHEARSAL,
    ),
)  # fmt: skip
SOUND = FaultyProgram()
