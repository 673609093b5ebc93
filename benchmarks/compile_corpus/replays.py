"""Programs that hold memory of CUDA graphs over a replay, or mark steps at the wrong places; and the right ways.

On a CPU plain torch shows nothing of it; the check rehearses replays there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.compile_corpus.programs import LIFETIME, Entry, Mlp, State, squares
from service.compilation.program import Step

MICRO = 4
Copy = Callable[[Tensor], Tensor]
KEPT: dict[str, Copy] = {
    "itself": lambda x: x,
    "detached": lambda x: x.detach(),
    "row": lambda x: x[0],
    "transposed": lambda x: x.t(),
    "viewed": lambda x: x.reshape(-1),
}
COPIED: dict[str, Copy] = {
    "cloned": lambda x: x.detach().clone(),
    "on_host": lambda x: x.detach().to("cpu", copy=True),
    "summed": lambda x: x.detach().sum(0),
    "number": lambda x: torch.tensor(x.mean().item()),
}


@dataclass
class Memory:
    rows: list[Tensor] = field(default_factory=list)


def _holders() -> dict[str, tuple[Any, Callable[[Any, Tensor], None], Callable[[Any], Tensor | None]]]:
    """Return ways to hold the previous step's result: the holder, how it is put there, how it is read."""

    def closing() -> tuple[Callable[[Tensor], None], Callable[[], Tensor | None]]:
        last: Tensor | None = None

        def put(x: Tensor) -> None:
            nonlocal last
            last = x

        return put, lambda: last

    return {
        "list": (list, lambda held, x: held.append(x), lambda held: held[-1] if held else None),
        "dict": (dict, lambda held, x: held.update(last=x), lambda held: held.get("last")),
        "deque": (partial(deque, maxlen=2), lambda held, x: held.append(x), lambda held: held[-1] if held else None),
        "attribute": (Memory, lambda held, x: setattr(held, "rows", [x]), lambda held: next(iter(held.rows), None)),
        "closure": (closing, lambda held, x: held[0](x), lambda held: held[1]()),
    }


HOLDERS = _holders()


def holding(holder: str, copy: Copy) -> Callable[[State], Iterator[Step]]:
    """Return a loop of inference that adds the held result of the previous step to its own."""
    make, put, get = HOLDERS[holder]

    def loop(state: State) -> Iterator[Step]:
        held = make()
        for state.step in range(10**9):
            state.mark()
            output = state.call(state.normal(state.step % 3, 8, 16))
            last = get(held)
            shown = output.sum() if last is None else output.sum() + 2 * last.to(output.device).sum()
            put(held, copy(output))
            yield Step(outputs={"shown": shown.clone()})

    return loop


class Leaving(Mlp):
    """Leaves an intermediate in an attribute."""

    hidden: Tensor | None = None

    def __init__(self, clones: bool) -> None:
        super().__init__()
        self.clones = clones

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.hidden = hidden.detach()
        return self.last(hidden)


def reads_attribute(state: State) -> Iterator[Step]:
    left: Tensor | None = None
    for state.step in range(10**9):
        state.mark()
        net = state["net"]
        before = left if net.clones else net.hidden
        output = state.call(state.normal(state.step % 3, 8, 16))
        left = net.hidden.clone()
        shown = output if before is None else output + before.mean()
        yield Step(outputs={"shown": shown.clone()})


class Carrying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(x, hidden)
        return self.head(hidden), hidden


def carries(copy: Copy) -> Callable[[State], Iterator[Step]]:
    def loop(state: State) -> Iterator[Step]:
        hidden = state.normal(5, 8, 16)
        for state.step in range(10**9):
            state.mark()
            output, after = state.call(state.normal(state.step % 3, 8, 16), hidden)
            yield Step(outputs={"out": output.clone()})
            hidden = copy(after)

    return loop


def accumulates(marks: str, to_none: bool) -> Callable[[State], Iterator[Step]]:
    """Return a loop over micro-batches that marks once a step, before each of them, or never."""

    def loop(state: State) -> Iterator[Step]:
        for state.step in range(10**9):
            if marks == "step":
                state.mark()
            state.optimizer.zero_grad(set_to_none=to_none)
            losses = []
            for micro in range(MICRO):
                if marks == "micro":
                    state.mark()
                loss = squares(state, state.call(state.normal(micro, 4, 16))) / MICRO
                loss.backward()
                losses.append(loss.detach().clone())
            state.optimizer.step()
            yield Step({"loss": torch.stack(losses).sum()})

    return loop


def several_forwards(marks: bool) -> Callable[[State], Iterator[Step]]:
    """Return a loop with three forwards and one backward, each forward marked as a step or not."""

    def loop(state: State) -> Iterator[Step]:
        while True:
            state.begin_step()
            losses = []
            for index in range(3):
                if marks and index:
                    torch.compiler.cudagraph_mark_step_begin()
                losses.append(squares(state, state.call(state.normal(index, 4, 16)).clone()))
            loss = torch.stack(losses).sum()
            yield state.descend(loss)

    return loop


def watched(marks: bool) -> Callable[[State], Iterator[Step]]:
    """Return a loop that looks at other samples between forward and backward."""

    def loop(state: State) -> Iterator[Step]:
        while True:
            state.begin_step()
            loss = squares(state, state.call(state.normal(1, 8, 16)).clone())
            with torch.no_grad():
                if marks:
                    torch.compiler.cudagraph_mark_step_begin()
                seen = state.call(state.normal(2, 8, 16)).mean().clone()
            loss.backward()
            state.optimizer.step()
            yield Step({"loss": loss.detach()}, {"seen": seen})

    return loop


def gradients(kind: str) -> Callable[[State], Iterator[Step]]:
    """Return a loop that uses gradients of the previous step: kept, copied, or of an optimizer that steps late,
    after a look at other samples.
    """

    def loop(state: State) -> Iterator[Step]:
        before: list[Tensor] = []
        for state.step in range(10**9):
            state.mark()
            if kind == "late" and state.step:
                with torch.no_grad():
                    state.call(state.normal(4, 8, 16))
                state.optimizer.step()
            state.optimizer.zero_grad()
            loss = squares(state, state.call(state.normal(state.step % 3, 8, 16)))
            loss.backward()
            own = [each.grad for each in state["net"].parameters() if each.grad is not None]
            turned = sum((one * other).sum() for one, other in zip(own, before, strict=False)) if before else loss
            before = [each.clone() if kind == "copied" else each for each in own] if kind != "late" else []
            if kind != "late":
                state.optimizer.step()
            yield Step({"loss": loss.detach()}, {"turned": torch.as_tensor(turned).detach().clone()})

    return loop


class Retaining(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.retain_grad()
        return self.last(hidden), hidden


def salient(inside: bool) -> Callable[[State], Iterator[Step]]:
    """Return a loop that reads an activation's gradient: retained by the module, or asked for of autograd."""

    def loop(state: State) -> Iterator[Step]:
        while True:
            state.begin_step()
            x = state.normal(1, 8, 16).requires_grad_(not inside)
            output, hidden = state.call(x) if inside else (state.call(x), x)
            loss = squares(state, output)
            loss.backward()
            state.optimizer.step()
            slope = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            yield Step({"loss": loss.detach()}, {"slope": slope.detach().clone()})

    return loop


def _wrong() -> Iterator[Entry]:
    held = "pytorch/pytorch#100927: a result held over a replay becomes the next"
    for name, copy in KEPT.items():
        for holder in HOLDERS if name == "itself" else ("list",):
            yield _entry(f"held_{holder}_{name}", Mlp, holding(holder, copy), held, "inference", fast=holder == "dict")
    yield _entry("attribute_read_late", partial(Leaving, False), reads_attribute, held, "inference")
    yield _entry("carried", Carrying, carries(lambda x: x), held, "inference")
    for marks, to_none in (("micro", True), ("never", True)):
        yield _entry(f"accumulated_{marks}", Mlp, accumulates(marks, to_none), "pytorch/pytorch#169545, #96693",
                     fast=marks == "micro")  # fmt: skip
    for marks in ("step", "never"):
        zeroed = "gradients that a CUDA graph has made are zeroed in place"
        yield _entry(f"zeroed_in_place_{marks}", Mlp, accumulates(marks, False), zeroed)
    yield _entry("forwards_marked", Mlp, several_forwards(True), "pytorch/pytorch#177192")
    yield _entry("watched_marked", Mlp, watched(True), "pytorch/pytorch#177192")
    for kind in ("kept", "late"):
        yield _entry(f"gradients_{kind}", Mlp, gradients(kind), "gradients of a CUDA graph are its memory")
    yield _entry("retained", Retaining, salient(True), "pytorch/pytorch#91468", fast=True)


def _entry(name: str, make: Any, loop: Any, thread: str, phase: Any = "train", *, fast: bool = False) -> Entry:
    return Entry(name, make, loop, phase, LIFETIME, thread, ("cuda",), fast=fast)


def _right() -> Iterator[Entry]:
    for name, copy in COPIED.items():
        yield Entry(f"copied_{name}", Mlp, holding("list", copy), "inference", fast=name == "cloned")
    for holder in ("dict", "deque", "attribute", "closure"):
        yield Entry(f"copied_{holder}", Mlp, holding(holder, COPIED["cloned"]), "inference")
    yield Entry("attribute_copied", partial(Leaving, True), reads_attribute, "inference")
    yield Entry("carried_copy", Carrying, carries(COPIED["cloned"]), "inference")
    yield Entry("accumulates", Mlp, accumulates("step", True), fast=True)
    yield Entry("forwards", Mlp, several_forwards(False))
    yield Entry("watched", Mlp, watched(False))
    yield Entry("gradients_copied", Mlp, gradients("copied"))
    yield Entry("slope_of_input", Mlp, salient(False))


WRONG: tuple[Entry, ...] = tuple(_wrong())
RIGHT: tuple[Entry, ...] = tuple(_right())
