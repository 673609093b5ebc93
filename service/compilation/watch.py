"""Watching a program use its compiled modules, whether or not it keeps to the boundary.

Replays begin where CUDA graphs would begin them: at the first call after a step mark or, as long as nobody has ever
marked a step, at every call for which no forward waits for a backward. What is alive then from before, and still
alive a whole round of replays later, has been overwritten.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from service.compilation.internals.functions import EagerFunctions, FunctionCall
from service.compilation.internals.marks import graphs_wait, heard_marks, in_backward
from service.compilation.internals.transfers import Transfers
from service.compilation.usage import Lifetimes, Mark, Reentry, StaleGradient, Usage
from service.parallel.boundary import Held, Origin, PendingBackwards, Shapes, Site, StepBoundary, caller
from service.parallel.boundary.calls import Ledger, tensors_in
from service.parallel.boundary.lifetimes import Outputs, address_of, held_of

FOREIGN = (
    str(Path(torch.__file__).parent),
    "service/parallel/boundary/",
    "service/compilation/watch",
    "service/compilation/internals/",
)
"""Where a program's own code is not."""
INVALID = -1
LOOKED_AT = (2, 3)
"""Beginnings of replays at which the results of the last round are looked for; a look takes 0.1 s or more."""


@contextmanager
def watching(
    units: Mapping[str, nn.Module],
    trainable: Mapping[str, Tensor],
    copied: Collection[str] = (),
    transfers: Transfers | None = None,
) -> Iterator[Watch]:
    """Watch the compiled ``units``, by name, of a program that trains ``trainable``.

    ``copied`` names the units whose results the boundary copies. ``transfers`` are those of a rehearsal.
    """
    watch = Watch(trainable, frozenset(copied), transfers)
    with ExitStack() as stack:
        stack.enter_context(watch.functions.active())
        stack.enter_context(heard_marks(watch.marked))
        stack.callback(register_optimizer_step_pre_hook(watch.stepping).remove)
        for name, unit in units.items():
            stack.enter_context(_intercepted(name, unit, watch))
        yield watch


@contextmanager
def _intercepted(name: str, unit: nn.Module, watch: Watch) -> Iterator[None]:
    """Calls of a compiled unit go by way of ``watch``; hooks on the module would become part of its graphs."""
    compiled: Any = unit._compiled_call_impl

    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # called from another compiled module, of whose graph it is a part
            return compiled(*arguments, **named)
        return watch.call(name, unit, compiled, arguments, named)

    unit._compiled_call_impl = call
    try:
        yield
    finally:
        unit._compiled_call_impl = compiled


class Watch:
    """What was seen so far. ``iteration`` is set by whoever runs the steps; ``generation`` counts replays."""

    def __init__(self, trainable: Mapping[str, Tensor], copied: frozenset[str], transfers: Transfers | None) -> None:
        self.iteration, self.generation = 0, 0
        self.functions = EagerFunctions(self._around, in_backwards=transfers is not None)
        self._transfers = transfers
        self._device: torch.device | None = None
        self._marks: list[Mark] = []
        self._ledger = Ledger()
        self._pending = PendingBackwards(self._backward_ran)
        self._forwards_wait = False
        self._marks_seen = 0
        self._outside: dict[Origin, None] = {}
        self._reentries: dict[Reentry, None] = {}
        self._results = [Outputs()]
        self._made: dict[str, int] = {}
        self._copied = copied
        self._held: list[Held] = []
        self._overlapping: list[Held] = []
        self._shapes: dict[str, dict[int, set[Shapes]]] = {}
        self._gradients = _Gradients(trainable)

    def call(self, name: str, unit: nn.Module, run: Callable[..., Any], arguments: Any, named: Any) -> Any:
        """Make a unit's call, and note it."""
        site = caller(outside=FOREIGN)
        origin = Origin(name, site, self.iteration)
        begins = self._begins()
        self._note_call(origin, unit, (arguments, named), begins)
        if begins:
            self._begin(site)
        with self.functions.suspended():
            results = run(*arguments, **named)
        outputs = list(tensors_in(results))
        self._device = outputs[0].device if outputs else self._device
        if torch.is_grad_enabled() and any(output.grad_fn is not None for output in outputs):
            self._pending.note(origin, outputs)
            self._forwards_wait = True
        self._made[name] = self._made.get(name, 0) + len(outputs)
        own = (*unit.parameters(), *unit.buffers())
        self._results[-1].note(origin, outputs, (*tensors_in((arguments, named)), *own))
        return results

    def _around(self, call: FunctionCall) -> Any:
        return call.run() if self._transfers is None else self._transfers.run(call)

    def marked(self) -> None:
        """A step mark is about to be set."""
        self._gradients.confirm()
        waiting = graphs_wait(self._device) if self._device else None
        self._marks.append(Mark(self.iteration, caller(outside=FOREIGN), self._pending.origins(), waiting))

    def stepping(self, *_: Any) -> None:
        """An optimizer is about to use gradients."""
        self._gradients.confirm()

    def usage(self) -> Usage:
        """Everything seen, after the last step."""
        self._gradients.confirm()
        held = {name: sum(each.origin.module == name for each in self._held) for name in self._made}
        return Usage(
            iterations=self.iteration + 1,
            invocations=self._ledger.counts(),
            outside=tuple(self._outside),
            marks=tuple(self._marks),
            reentries=tuple(self._reentries),
            held=tuple(self._held),
            overlapping=tuple(self._overlapping),
            gradients=tuple(self._gradients.stale),
            lifetimes={name: self._lifetimes(name, made, held[name]) for name, made in self._made.items()},
            shapes={
                name: tuple(frozenset(seen.get(index, ())) for index in range(self.iteration + 1))
                for name, seen in self._shapes.items()
            },
        )

    def _lifetimes(self, name: str, made: int, held: int) -> Lifetimes:
        copied = made - held if name in self._copied else 0
        return Lifetimes(consumed=made - held - copied, copied=copied, held=held)

    def _note_call(self, origin: Origin, unit: nn.Module, arguments: Any, begins: bool) -> None:
        call = self._ledger.add(origin.module, unit, arguments)
        self._shapes.setdefault(origin.module, {}).setdefault(self.iteration, set()).add(call.shapes)
        if not _across_the_boundary():
            self._outside[origin] = None
        waiting, inside = self._pending.origins(), in_backward()
        pending = sum(each.module == origin.module for each in waiting)
        unsafe = begins and (inside or (bool(waiting) and not self._marks))
        if pending or inside or unsafe:
            self._reentries[Reentry(origin.module, self.iteration, origin.site, pending, inside, unsafe)] = None

    def _begins(self) -> bool:
        """Whether CUDA graphs would begin to write over their memory with this call."""
        if not self._marks:
            return not self._forwards_wait
        marked, self._marks_seen = len(self._marks) > self._marks_seen, len(self._marks)
        return marked

    def _begin(self, site: Site) -> None:
        self.generation += 1
        self._gradients.confirm()
        self._gradients.begin(self.iteration, site)
        # Of the last generation's results a loop's variables may well hold the newest until they get the next.
        old, self._results = self._results[:-1], [*self._results[-1:], Outputs()]
        outputs = [output for results in old for output in results.alive()]
        if outputs:
            self._held.extend(held_of(outputs))
        if self.generation in LOOKED_AT:
            self._overlapping.extend(held_of(self._results[0].alive()))

    def _backward_ran(self, _origin: Origin) -> None:
        self._forwards_wait = False
        self._gradients.confirm()
        self._gradients.backward_ran = True


class _Gradients:
    """Gradients that backwards made anew, in the memory of CUDA graphs, and that are used on when it is reused.

    A backward adds to a gradient that is there already, wherever that is; only where there is none does its own
    become the parameter's. Those of FSDP are made outside of the graphs.
    """

    def __init__(self, trainable: Mapping[str, Tensor]) -> None:
        self.trainable = {name: value for name, value in trainable.items() if not isinstance(value, DTensor)}
        self.stale: dict[StaleGradient, None] = {}
        self.backward_ran = False
        self._known: dict[str, int | None] = {}
        self._suspects: list[tuple[Outputs, StaleGradient]] = []

    def begin(self, iteration: int, site: Site) -> None:
        """Replays begin: a gradient that is there was made before, and if it is new, by the graphs."""
        for name, parameter in self.trainable.items():
            gradient = parameter.grad
            address = None if gradient is None else _place(gradient)
            new = address not in {None, INVALID, self._known.get(name)}
            if gradient is not None and new and self.backward_ran:
                self._suspect(gradient, StaleGradient(name, iteration, site))
            self._known[name] = address
        self.backward_ran = False

    def confirm(self) -> None:
        """When a backward runs, an optimizer steps, or replays begin again: a gradient that is still the parameter's is
        used. Until then it may yet be dropped.
        """
        for outputs, stale in self._suspects:
            gradient = self.trainable[stale.parameter].grad
            alive = {output.storage.cdata for output in outputs.alive()}
            if gradient is not None and _place(gradient) in {*alive, INVALID}:
                self.stale[stale] = None
        self._suspects.clear()

    def _suspect(self, gradient: Tensor, stale: StaleGradient) -> None:
        outputs = Outputs()
        outputs.note(Origin(stale.parameter, stale.site, stale.iteration), [gradient])
        self._suspects.append((outputs, stale))


def _place(gradient: Tensor) -> int:
    """Where it is; ``INVALID`` if CUDA graphs have reused its memory while they were being recorded."""
    try:
        return address_of(gradient)
    except RuntimeError:
        return INVALID


def _across_the_boundary() -> bool:
    """Whether some caller is the boundary."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is StepBoundary.boundary_call.__code__:
            return True
    return False
