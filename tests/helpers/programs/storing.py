"""Modules that leave a result of their forward somewhere, and loops that read it in the next step, or in time."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from programs.loops import FEATURES, State, StepOf
from programs.registry import Planted
from service.compilation.program import Step


class Storing(nn.Module):
    """``policy_hidden`` is an intermediate of its last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, 3)
        self.policy_hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        self.policy_hidden = hidden.detach()
        return self.head(hidden.square())


class StoringOnHost(Storing):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        self.policy_hidden = hidden.detach().cpu()
        return self.head(hidden.square())


class Appending(Storing):
    """Keeps an intermediate of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        self.history.append(hidden.detach())
        return self.head(hidden.square())


class AppendingOnHost(Appending):
    """Keeps a copy of the newest two: a list that grows on is compiled for anew with each length."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        self.history.append(hidden.detach().cpu())
        del self.history[:-2]
        return self.head(hidden.square())


class Noting(nn.Linear):
    """Has a dictionary for tensors."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.known: dict[str, Tensor] = {}


class Filing(Storing):
    """Keeps an intermediate by name, in a dictionary of a module within."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Noting()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        cast(Noting, self.head).known["hidden"] = hidden.detach()
        return self.head(hidden.square())


class Recurrent(Storing):
    """Reads what its last forward has left."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        last = self.policy_hidden
        if last is not None:
            hidden = hidden + 0.5 * last  # read
        self.policy_hidden = hidden.detach()
        return self.head(hidden.square())


class Square(Storing):
    """Its results can be its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)))


def reading_late(state: State) -> Step:
    """What the last forward has left is read after the next one."""
    state.boundary.step_boundary()
    module = cast(Storing, state.scorer)
    previous = module.policy_hidden
    scores = state.call(state.batch())
    loss = scores.square().mean()
    change = torch.zeros_like(loss) if previous is None else (previous.sum() + loss)  # read
    return Step(outputs={"change": change.clone(), "loss": loss.clone()})


def reading_in_time(state: State) -> Step:
    """What this forward has left is read before the next one, and its variables live on until then."""
    state.boundary.step_boundary()
    scores = state.call(state.batch())
    hidden = cast(Storing, state.scorer).policy_hidden
    assert hidden is not None
    state.scores = [scores, hidden]
    return Step(outputs={"hidden": (hidden.sum() + scores.sum()).clone()})


def reading_a_copy(state: State) -> Step:
    """What the last forward has left is copied before the next one begins."""
    state.boundary.step_boundary()
    module = cast(Storing, state.scorer)
    previous = None if module.policy_hidden is None else module.policy_hidden.clone()
    scores = state.call(state.batch())
    return Step(outputs={"change": (scores.sum() if previous is None else previous.sum() - scores.sum()).clone()})


def summing_history(state: State) -> Step:
    """The module's list is read: all but the newest entry have been written over."""
    state.boundary.step_boundary()
    state.call(state.batch())
    return Step(outputs={"sum": torch.stack(cast(Appending, state.scorer).history[-3:]).sum(0)})  # read


def reading_a_file(state: State) -> Step:
    """What a module within has in a dictionary is read after the next forward."""
    state.boundary.step_boundary()
    known = cast(Any, state.scorer).head.known
    previous = known.get("hidden")
    scores = state.call(state.batch())
    change = scores.sum() if previous is None else (previous.sum() + scores.sum())  # read
    return Step(outputs={"change": change.clone()})


def calling(state: State) -> Step:
    state.boundary.step_boundary()
    return Step(outputs={"scores": state.call(state.batch()).clone()})


def through_a_closure() -> StepOf:
    last: list[Tensor] = []

    def step(state: State) -> Step:
        if state.step == 0:
            last.clear()
        state.boundary.step_boundary()
        scores = state.call(state.batch())
        change = scores - last[-1] if last else scores  # read
        last[:] = [scores]
        return Step(outputs={"change": change.clone()})

    step.__name__ = "through_a_closure"
    return step


def feeding_back(state: State) -> Step:
    """The last step's result is an input of the next."""
    state.boundary.step_boundary()
    x = state.batch()
    if state.scores:
        x = state.scores[-1]
    state.scores = [state.call(x)]
    return Step(outputs={"scores": state.scores[-1].clone()})


def keeping_gradients(state: State) -> Step:
    """A gradient of the last step is compared with the new one."""
    state.boundary.step_boundary()
    state.optimizer.zero_grad(set_to_none=True)
    loss = state.call(state.batch()).square().mean()
    loss.backward()
    gradient = next(state.scorer.parameters()).grad
    assert gradient is not None
    change = (gradient - state.scores[-1]).norm() if state.scores else gradient.norm()  # read
    state.scores = [gradient]
    state.optimizer.step()
    return Step({"loss": loss.detach().clone(), "change": change.clone()})


DEFECTS: tuple[Planted, ...] = (
    Planted(reading_late, "inference", "fail_lifetime", make=Storing),
    Planted(summing_history, "inference", "fail_lifetime", make=Appending),
    Planted(calling, "inference", "fail_lifetime", make=Recurrent),
    Planted(through_a_closure(), "inference", "fail_lifetime"),
    Planted(feeding_back, "inference", "fail_lifetime", make=Square),
    Planted(reading_a_file, "inference", "fail_lifetime", make=Filing),
    Planted(keeping_gradients, "train", "fail_lifetime"),
)
HOLDERS = {
    "reading_late": ("scorer.policy_hidden", "previous, a variable of reading_late"),
    "summing_history": ("scorer.history[0]",),
    "calling": ("scorer.policy_hidden",),
    "through_a_closure": ("last[0], a variable that through_a_closure.<locals>.step closes over",),
    "reading_a_file": ("scorer.head.known['hidden']", "previous, a variable of reading_a_file"),
    "feeding_back": ("State.scores[0]", "x, a variable of feeding_back"),
    "keeping_gradients": ("State.scores[0]",),
}
"""Who holds what each of ``DEFECTS`` reads too late."""
INNOCENT: tuple[Planted, ...] = (
    Planted(reading_in_time, "inference", make=Storing),
    Planted(reading_a_copy, "inference", make=Storing),
    Planted(reading_late, "inference", make=StoringOnHost),
    Planted(summing_history, "inference", make=AppendingOnHost),
    Planted(calling, "inference", make=Storing),
)
ALL = (*DEFECTS, *INNOCENT)


def read_by(planted: Planted) -> str:
    """The line that reads too late, as a finding names it: it ends in ``# read``."""
    readers: dict[str, Any] = {"calling": Recurrent.forward, "feeding_back": State.call}
    code: Any = readers.get(planted.name, planted.step)
    lines, first = inspect.getsourcelines(code)
    offset = next(number for number, line in enumerate(lines) if line.rstrip().endswith("# read"))
    return f"{inspect.getsourcefile(code)}:{first + offset} in {code.__code__.co_name}"
