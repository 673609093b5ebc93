"""Loops around a compiled module, on any device; each with one mistake in its use of CUDA graphs, or with none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from service.compilation.program import Parts, Step
from service.parallel.boundary import StepBoundary

CPU = torch.device("cpu")
MICRO_BATCHES, ROWS, FEATURES = 3, 5, 4
mark = torch.compiler.cudagraph_mark_step_begin


class Scorer(nn.Module):
    """Its backward needs activations: wrong ones give wrong gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)).square())


@dataclass
class State:
    """What a loop keeps from step to step."""

    parts: Parts
    boundary: StepBoundary
    device: torch.device
    step: int = 0
    scores: list[Tensor] = field(default_factory=list)

    @property
    def scorer(self) -> nn.Module:
        return self.parts.modules["scorer"]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.parts.optimizers[0]

    def batch(self, micro: int = 0, rows: int = ROWS) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.step + micro)
        return torch.randn(rows, FEATURES, generator=generator).to(self.device, self.parts.dtype)

    def call(self, x: Tensor) -> Tensor:
        result: Tensor = self.boundary.boundary_call(self.scorer, x)  # read
        return result


StepOf = Callable[[State], Step]


@dataclass(frozen=True)
class LoopProgram:
    """``step`` in both phases, around a module that ``make`` gives. ``kept`` as in ``Parts``."""

    step: StepOf
    device: torch.device = CPU
    kept: tuple[str, ...] = ()
    make: Callable[[], nn.Module] = Scorer
    period: int = 1

    def build(self, dtype: torch.dtype) -> Parts:
        torch.manual_seed(3)
        scorer = self.make().to(self.device, dtype)
        return Parts({"scorer": scorer}, ("scorer",), (SGD(scorer.parameters(), lr=0.1),), dtype, self.kept)

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        parts.modules["scorer"].train()
        yield from self._steps(State(parts, boundary, self.device))

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        parts.modules["scorer"].eval()
        with torch.no_grad():
            yield from self._steps(State(parts, boundary, self.device))

    def _steps(self, state: State) -> Iterator[Step]:
        for number in count():
            state.step = number
            yield self.step(state)


def _update(state: State, loss: Tensor) -> Step:
    state.optimizer.step()
    return Step({"loss": loss.detach().clone()})


def _loss(scores: Tensor) -> Tensor:
    return scores.square().mean()


def _accumulate(state: State, score: Callable[[Tensor], Tensor]) -> Step:
    """Add up the gradients of micro-batches."""
    total = torch.zeros((), device=state.device, dtype=state.parts.dtype)
    for micro in range(MICRO_BATCHES):
        loss = _loss(score(state.batch(micro)))
        loss.backward()
        total += loss.detach()
    return _update(state, total)


# No mistakes


def once(state: State, loss_of: Callable[[Tensor], Tensor] = _loss) -> Step:
    """One forward, one backward, one mark."""
    state.boundary.step_boundary()
    state.optimizer.zero_grad()
    loss = loss_of(state.call(state.batch()))
    loss.backward()
    return _update(state, loss)


def unmarked(state: State) -> Step:
    """One forward, one backward, and nobody marks."""
    state.optimizer.zero_grad()
    loss = _loss(state.scorer(state.batch()))
    loss.backward()
    return _update(state, loss)


def many_forwards(state: State) -> Step:
    """Several forwards, one backward, one mark."""
    state.boundary.step_boundary()
    state.optimizer.zero_grad()
    loss = sum(
        (_loss(state.call(state.batch(micro))) for micro in range(MICRO_BATCHES)), torch.zeros(()).to(state.device)
    )
    loss.backward()
    return _update(state, loss)


def accumulating(state: State) -> Step:
    """Micro-batches under one mark."""
    state.boundary.step_boundary()
    state.optimizer.zero_grad()
    return _accumulate(state, state.call)


def in_place_gradients(state: State) -> Step:
    """Gradients that exist before the first backward, and are set to zero in place."""
    for parameter in state.scorer.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    state.optimizer.zero_grad(set_to_none=False)
    return _accumulate(state, state.scorer)


def telemetry(state: State) -> Step:
    """An inference call between forward and backward."""
    state.boundary.step_boundary()
    state.optimizer.zero_grad()
    loss = _loss(state.call(state.batch()))
    with torch.no_grad():
        seen = state.call(state.batch(1)).mean().clone()
    loss.backward()
    return Step({"loss": _update(state, loss).losses["loss"], "seen": seen})


def late_to_drop(state: State) -> Step:
    """The last step's gradients are there until the new loss is: nothing reads them any more."""
    state.boundary.step_boundary()
    first = state.call(state.batch())
    loss = _loss(first) + _loss(state.call(state.batch(1)))
    state.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    return _update(state, loss)


def in_turns(state: State) -> Step:
    """Two parts are trained one after the other: the last gradients of the second are there until its turn, unread."""
    state.boundary.step_boundary()
    loss = torch.zeros(())
    parts: tuple[Any, ...] = (state.scorer.first, state.scorer.head)
    for part in parts:
        part.zero_grad()
        loss = _loss(state.call(state.batch()))
        torch.autograd.backward(loss, inputs=list(part.parameters()))
    return _update(state, loss)


def remembering(state: State) -> Step:
    """Scores of earlier steps are used again: right if the boundary has copied them."""
    state.boundary.step_boundary()
    state.scores.append(state.call(state.batch()))
    return Step(outputs={"scores": torch.stack(state.scores[-3:]).sum(0)})


compiled_mean = torch.compile(lambda scores: scores.square().mean(), backend="eager")


def compiling_its_own(state: State) -> Step:
    """The program has compiled its loss itself."""
    return once(state, compiled_mean)


def scoring_in_a_thread(state: State) -> Step:
    """Telemetry of its own thread, which does not know the boundary; right on the CPU, and noted."""
    step = once(state)
    seen: list[Tensor] = []

    def score() -> None:
        with torch.no_grad():
            seen.append(state.scorer(state.batch(1)).mean().clone())

    thread = Thread(target=score, name="telemetry")
    thread.start()
    thread.join()
    return Step({**step.losses, "seen": seen[0]})


class Outcome:
    """Refers to itself, so that it stays until the collector comes."""

    def __init__(self, scores: Tensor) -> None:
        self.scores, self.own = scores, self


def leaving_cycles(state: State) -> Step:
    """Results are in objects that nobody has any more, but for themselves."""
    state.boundary.step_boundary()
    return Step(outputs={"scores": Outcome(state.call(state.batch())).scores.clone()})


# One mistake each, in a function of its own: reports name it


def holding(state: State) -> Step:
    """Scores of earlier steps are used again; that they are detached does not make them copies."""
    state.boundary.step_boundary()
    state.scores.append(state.call(state.batch()).detach())
    return Step(outputs={"scores": torch.stack(state.scores[-3:]).sum(0)})


def comparing(state: State) -> Step:
    """The last step's scores are compared with the new ones, which have been written over them."""
    state.boundary.step_boundary()
    new = state.call(state.batch())
    change = new - state.scores[-1] if state.scores else new
    state.scores = [new]
    return Step(outputs={"change": change.clone()})


def stepping_late(state: State) -> Step:
    """A step is marked, and telemetry called, before the optimizer has used the gradients."""
    state.optimizer.zero_grad(set_to_none=True)
    loss = _loss(state.call(state.batch()))
    loss.backward()
    state.boundary.step_boundary()
    with torch.no_grad():
        seen = state.scorer(state.batch(1)).mean().clone()
    return Step({**_update(state, loss).losses, "seen": seen})


def watching_late(state: State) -> Step:
    """The size of the last step's gradients is read when the next step's results have been written over them."""
    state.boundary.step_boundary()
    loss = _loss(state.call(state.batch()))
    gradients = [each.grad for each in state.scorer.parameters() if each.grad is not None]
    size = torch.stack([each.norm() for each in gradients]).sum() if gradients else torch.zeros(()).to(state.device)
    state.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    return Step({**_update(state, loss).losses, "size": size})


def marking_each_forward(state: State) -> Step:
    state.optimizer.zero_grad()
    loss = torch.zeros((), device=state.device, dtype=state.parts.dtype)
    for micro in range(MICRO_BATCHES):
        mark()
        loss = loss + _loss(state.scorer(state.batch(micro)))
    loss.backward()
    return _update(state, loss)


def marking_telemetry(state: State) -> Step:
    """Telemetry marks a step of its own between forward and backward."""
    mark()
    state.optimizer.zero_grad()
    loss = _loss(state.scorer(state.batch()))
    mark()
    # With gradients: the same graph as the forward that is waiting.
    seen = state.scorer(state.batch(1)).detach().mean().clone()
    loss.backward()
    return Step({"loss": _update(state, loss).losses["loss"], "seen": seen})


def accumulating_unmarked(state: State) -> Step:
    """Each micro-batch begins replays, which write over the gradients of the one before."""
    state.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=state.device, dtype=state.parts.dtype)
    for micro in range(MICRO_BATCHES):
        loss = _loss(state.scorer(state.batch(micro)))
        loss.backward()
        total += loss.detach()
    return _update(state, total)


def marking_each_micro_batch(state: State) -> Step:
    state.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=state.device, dtype=state.parts.dtype)
    for micro in range(MICRO_BATCHES):
        mark()
        loss = _loss(state.scorer(state.batch(micro)))
        loss.backward()
        total += loss.detach()
    return _update(state, total)


def calling_in_backward(state: State) -> Step:
    """A hook scores again while the backward runs: the first forward's activations are written over."""
    state.optimizer.zero_grad()
    first = state.scorer(state.batch())
    second = state.scorer(first.tanh()[:, :1].expand(-1, FEATURES))

    def rescore(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            return gradient * state.scorer(state.batch(2)).detach().mean()

    first.register_hook(rescore)
    loss = _loss(second)
    loss.backward()
    return _update(state, loss)


def growing(state: State) -> Step:
    """Another number of rows in every step."""
    state.boundary.step_boundary()
    state.optimizer.zero_grad()
    loss = _loss(state.call(state.batch(rows=2 + state.step)))
    loss.backward()
    return _update(state, loss)
