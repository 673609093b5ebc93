"""Watches a program use its compiled modules, whether or not it marks its steps.

Replays begin where CUDA graphs would begin them: at the first call after a step mark or, until a step has been marked,
at every call while no forward waits for a backward. A result that is alive then, and still alive a whole round of
replays later, has been overwritten.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from service.compilation.instruments.cudagraphs import graph_results
from service.compilation.instruments.functions import EagerFunctions, FunctionCall, unobserved
from service.compilation.instruments.marks import graphs_wait, heard_marks
from service.compilation.instruments.transfers import Transfers
from service.compilation.monitor.results import ResultLifetimes
from service.compilation.monitor.usage import Lifetimes, Mark, Reentry, RetainedRead, StaleGradient, UnitCalls, Usage
from service.parallel.boundary import CallSite, Origin, PendingBackwards, Shapes, StepBoundary, caller
from service.parallel.boundary.holders import FOREIGN
from service.parallel.boundary.lifetimes import NOWHERE, CallCounter, CallResult, LiveResults, address_of, local
from service.parallel.boundary.watch import in_backward, intercepted
from service.parallel.containers import tensors_in

_OVERWRITTEN = "overwritten"
"""CUDA graphs' message about a tensor whose memory they have taken, while they are being recorded."""


@contextmanager
def monitored(
    units: Mapping[str, nn.Module],
    trainable: Mapping[str, Tensor],
    copied: Collection[str] = (),
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
    *,
    transfers: Transfers | None = None,
    sees_reads: bool = True,
) -> Iterator[BoundaryMonitor]:
    """Monitor the compiled ``units``, by name, of a program that trains ``trainable``.

    ``copied`` names the units whose results the boundary copies, ``modules`` the program's. ``transfers`` are those
    of a rehearsal. Other code that the program has compiled is compiled anew when eager code is no longer
    watched: so ``sees_reads`` is set only if it matters which results that code reads.
    """
    results = ResultLifetimes(modules or units, trainable, looks=sees_reads)
    monitor = BoundaryMonitor(trainable, frozenset(copied), results, transfers)
    with ExitStack() as stack:
        if sees_reads:
            stack.enter_context(monitor.functions.active())
        stack.enter_context(heard_marks(monitor.note_mark))
        stack.callback(register_optimizer_step_pre_hook(monitor.stepping).remove)
        for name, unit in units.items():
            stack.enter_context(intercepted(unit, partial(monitor.call, name, unit)))
        yield monitor


class BoundaryMonitor:
    """Records how a program uses its results. The runner sets ``iteration``; ``generation`` counts replays."""

    def __init__(
        self,
        trainable: Mapping[str, Tensor],
        copied: frozenset[str],
        results: ResultLifetimes,
        transfers: Transfers | None,
    ) -> None:
        self.iteration, self.generation = 0, 0
        self.functions = EagerFunctions(
            self._around, self._backward_begins, self._backward_ended, in_backwards=transfers is not None
        )
        self._transfers = transfers
        self._results = results
        self._calls = UnitCalls()
        self._backward = Origin("", CallSite("", 0, ""), 0)
        self._device: torch.device | None = None
        self._marks: list[Mark] = []
        self._calls_made = CallCounter()
        self._pending = PendingBackwards(self._backward_ran)
        self._forwards_wait = False
        self._marks_seen = 0
        self._outside: dict[Origin, None] = {}
        self._reentries: dict[Reentry, None] = {}
        self._made: dict[str, int] = {}
        self._copied = copied
        self._shapes: dict[str, dict[int, set[Shapes]]] = {}
        self._gradients = _Gradients(trainable)
        self._returned: list[tuple[weakref.ref[Tensor], Origin]] = []
        self._retained: dict[RetainedRead, None] = {}

    def call(self, name: str, unit: nn.Module, run: Callable[..., Any], arguments: Any, named: Any) -> Any:
        """Make a unit's call, and note it."""
        origin = Origin(name, caller(outside=FOREIGN), self.iteration)
        begins = self._begins()
        self._note_call(origin, unit, (arguments, named), begins)
        if begins:
            self._begin(origin.site)
        given = self._results.overwritten_in((arguments, named))
        self._read(given, origin.site, (arguments, named))
        with self._calls.under_way(origin, {output.address for _, output in given}) as made:
            results = self._run(origin, unit, partial(run, *arguments, **named))
        outputs = list(tensors_in(results))
        self._device = outputs[0].device if outputs else self._device
        if torch.is_grad_enabled() and any(output.grad_fn is not None for output in outputs):
            self._pending.note(origin, outputs)
            self._forwards_wait = True
        self._made[name] = self._made.get(name, 0) + len(outputs)
        own = (*unit.parameters(), *unit.buffers())
        self._results.note(origin, outputs, (*tensors_in((arguments, named)), *own))
        self._results.note(origin, [*made, *self._in_graphs()], own, returned=False)
        if self._transfers is not None:
            self._returned = [each for each in self._returned if each[0]() is not None]
            self._returned += [(weakref.ref(each), origin) for each in outputs if self._transfers.on_device(each)]
        return results

    def _run(self, origin: Origin, unit: nn.Module, run: Callable[[], Any]) -> Any:
        try:
            with self.functions.suspended():
                return run()
        except RuntimeError as error:
            if _OVERWRITTEN in str(error):  # one of those that the module itself holds, if any
                for part in unit.modules():
                    self._read(self._results.overwritten_in(vars(part)), origin.site)
            raise

    def entering(self, inputs: Sequence[tuple[Tensor, CallSite | None]]) -> None:
        """Note that a rehearsed graph runs, with inputs that it reads first at these places."""
        call = self._calls.current
        if call is None:  # a backward, with its forward's saved tensors
            return
        for tensor, site in inputs:
            found = self._results.overwritten_in([tensor])
            implicit = [each for each in found if each[1].address not in call.given]
            self._read(implicit, site or call.origin.site, inputs)

    def made(self, results: Sequence[Tensor]) -> None:
        """Note that a rehearsed graph has run."""
        if self._calls.current is None:
            self._results.note(self._backward, results, returned=False)
        else:
            self._calls.current.made.extend(results)

    def _around(self, call: FunctionCall) -> Any:
        """Make a torch function's call in eager code, and record its reads."""
        found = self._results.overwritten_in((call.arguments, call.named))
        try:
            result = call.run() if self._transfers is None else self._transfers.run(call)
        except RuntimeError:  # CUDA graphs raise this while they are recorded
            if found:
                self._read(found, caller(outside=FOREIGN), (call.arguments, call.named))
            raise
        if read := [each for each in found if call.reads(each[0], result)]:
            self._read(read, caller(outside=FOREIGN), (call.arguments, call.named))
        self._gradients.read(call, result)
        if call.gives_gradient and isinstance(result, Tensor) and not call.arguments[0].is_leaf:
            self._read_retained(call.arguments[0])
        return result

    def handed_over(self, results: Any, site: CallSite) -> None:
        """Note that the program hands over results of a step at ``site``: whoever takes them reads them."""
        self._read(self._results.overwritten_in(results), site, (results,))

    def _read_retained(self, tensor: Tensor) -> None:
        """Note that a gradient of a rehearsed result is read: replays give out the same tensor as the first."""
        for reference, origin in self._returned:
            if reference() is tensor:
                self._retained[RetainedRead(self.iteration, caller(outside=FOREIGN), origin)] = None

    def _read(self, found: Sequence[tuple[Tensor, CallResult]], site: CallSite, ignored: Sequence[Any] = ()) -> None:
        for tensor, output in found:
            self._results.read(tensor, output, site, self.iteration, (*ignored, *found))

    @unobserved
    def _in_graphs(self) -> list[Tensor]:
        """Return the results of CUDA graphs since they last began."""
        return graph_results(self._device) if self._device is not None else []

    def _backward_begins(self) -> None:
        self._backward = Origin("a backward", caller(outside=FOREIGN), self.iteration)

    def _backward_ended(self) -> None:
        """Note its new results: their memory held results of an earlier step, and they may be read at once."""
        self._results.note(self._backward, self._in_graphs(), returned=False)

    def note_mark(self) -> None:
        """Note that a step mark is about to be set."""
        self._gradients.confirm()
        waiting = graphs_wait(self._device) if self._device else None
        self._marks.append(Mark(self.iteration, caller(outside=FOREIGN), self._pending.origins(), waiting))

    def stepping(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that ``optimizer`` is about to use its gradients."""
        self._gradients.use(each for group in optimizer.param_groups for each in group["params"])

    def usage(self) -> Usage:
        """Return all observations, after the last step."""
        self._gradients.confirm()
        return Usage(
            iterations=self.iteration + 1,
            invocations=self._calls_made.counts(),
            outside=tuple(self._outside),
            marks=tuple(self._marks),
            reentries=tuple(self._reentries),
            reads=tuple(self._results.reads),
            held=tuple(self._results.held),
            overlapping=tuple(self._results.overlapping),
            gradients=tuple(self._gradients.stale),
            retained=tuple(self._retained),
            lifetimes={name: self._lifetimes(name, made) for name, made in self._made.items()},
            shapes={
                name: tuple(frozenset(seen.get(index, ())) for index in range(self.iteration + 1))
                for name, seen in self._shapes.items()
            },
        )

    def _lifetimes(self, name: str, made: int) -> Lifetimes:
        held = self._results.held_over[name]
        copied = made - held if name in self._copied else 0
        return Lifetimes(consumed=made - held - copied, copied=copied, held=held)

    def _note_call(self, origin: Origin, unit: nn.Module, arguments: Any, begins: bool) -> None:
        call = self._calls_made.add(origin.module, unit, arguments)
        self._shapes.setdefault(origin.module, {}).setdefault(self.iteration, set()).add(call.shapes)
        if not _across_the_boundary():
            self._outside[origin] = None
        waiting, inside = self._pending.origins(), in_backward()
        pending = sum(each.module == origin.module for each in waiting)
        unsafe = begins and (inside or (bool(waiting) and not self._marks))
        if pending or inside or unsafe:
            self._reentries[Reentry(self.iteration, origin.site, origin.module, pending, inside, unsafe)] = None

    def _begins(self) -> bool:
        """Return whether CUDA graphs would begin to write over their memory with this call."""
        if not self._marks:
            return not self._forwards_wait
        marked, self._marks_seen = len(self._marks) > self._marks_seen, len(self._marks)
        return marked

    def _begin(self, site: CallSite) -> None:
        self.generation += 1
        self._gradients.confirm()
        self._gradients.begin(self.iteration, site)
        self._results.note(self._backward, self._in_graphs(), returned=False)
        self._results.begin(self.generation)

    def _backward_ran(self, _origin: Origin) -> None:
        self._forwards_wait = False
        self._gradients.confirm()
        self._gradients.backward_ran = True


@dataclass(frozen=True)
class _SuspectGradient:
    """An overwritten gradient. ``version``: its count of in-place changes when that happened."""

    outputs: LiveResults
    stale: StaleGradient
    version: int


class _Gradients:
    """Gradients that backwards created in the memory of CUDA graphs, and that are used after it is reused.

    A backward adds to an existing gradient, wherever it lies; only a parameter without one takes the backward's
    own. FSDP creates its gradients outside the graphs.
    """

    def __init__(self, trainable: Mapping[str, Tensor]) -> None:
        self.trainable = {name: value for name, value in trainable.items() if not isinstance(value, DTensor)}
        self.stale: dict[StaleGradient, None] = {}
        self.backward_ran = False
        self._known: dict[str, StorageWeakRef] = {}
        self._suspects: list[_SuspectGradient] = []

    @unobserved
    def begin(self, iteration: int, site: CallSite) -> None:
        """Note that replays begin: a gradient that exists was made before and, if it is new, by the graphs."""
        for name, parameter in self.trainable.items():
            gradient = parameter.grad
            address = NOWHERE if gradient is None else _place(gradient)
            if gradient is None or address == NOWHERE:
                self._known.pop(name, None)
            elif name not in self._known or self._known[name].cdata != address:
                # While this refers to it, nothing else gets its address.
                self._known[name] = StorageWeakRef(local(gradient).untyped_storage())  # type: ignore[no-untyped-call]
                if self.backward_ran:
                    self._suspect(gradient, StaleGradient(iteration, site, name))
        self.backward_ran = False

    @unobserved
    def confirm(self) -> None:
        """Count suspects that a backward has added to since, or that were changed in place. A gradient dropped unread
        is no mistake, however many backwards of other parameters it outlives.
        """
        self._suspects = [each for each in self._suspects if self._is_there(each)]
        self._count(lambda suspect, gradient: gradient._version != suspect.version)

    @unobserved
    def use(self, parameters: Iterable[Tensor]) -> None:
        """Count suspects that are gradients of ``parameters``, which an optimizer is about to step."""
        self.confirm()
        own = {id(each) for each in parameters}
        self._count(lambda suspect, _: id(self.trainable[suspect.stale.parameter]) in own)

    @unobserved
    def read(self, call: FunctionCall, result: Any) -> None:
        """Count those suspects whose numbers a call in eager code needs."""
        if self._suspects:
            given = {_place(each) for each in tensors_in((call.arguments, call.named)) if call.reads(each, result)}
            self._count(lambda _, gradient: _place(gradient) in given)

    def _count(self, is_used: Callable[[_SuspectGradient, Tensor], bool]) -> None:
        left = []
        for suspect in self._suspects:
            gradient = self.trainable[suspect.stale.parameter].grad
            if gradient is not None and self._is_there(suspect) and is_used(suspect, gradient):
                self.stale[suspect.stale] = None
            else:
                left.append(suspect)
        self._suspects = left

    def _is_there(self, suspect: _SuspectGradient) -> bool:
        """Return whether it is still its parameter's gradient."""
        gradient = self.trainable[suspect.stale.parameter].grad
        alive = {output.storage.cdata for output in suspect.outputs.alive()}
        return gradient is not None and _place(gradient) in {*alive, NOWHERE}

    def _suspect(self, gradient: Tensor, stale: StaleGradient) -> None:
        outputs = LiveResults()
        outputs.note(Origin(stale.parameter, stale.site, stale.iteration), [gradient])
        self._suspects.append(_SuspectGradient(outputs, stale, gradient._version))


def _place(gradient: Tensor) -> int:
    """Return the address of a gradient; ``NOWHERE`` if CUDA graphs have reused its memory while they were being
    recorded.
    """
    try:
        return address_of(gradient)
    except RuntimeError:
        return NOWHERE


def _across_the_boundary() -> bool:
    """Return whether some caller is the boundary."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is StepBoundary.boundary_call.__code__:
            return True
    return False
