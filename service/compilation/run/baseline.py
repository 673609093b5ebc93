"""Makes the baseline by which compiled runs are judged, out of uncompiled ones: eager, eager again for its noise,
float64 for the truth, and eager in TF32 where a device may compute in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol
from uuid import uuid4

import torch
from torch import Tensor

from service.compilation.host_fault import raise_host_fault
from service.compilation.instruments.checkpoints import counted_checkpoints
from service.compilation.instruments.profile import Peak, allocated_bytes, peak, reset_peak
from service.compilation.instruments.switches import eager_random_numbers
from service.compilation.instruments.text import first_line
from service.compilation.instruments.tf32 import FactorsSeen, InTf32, factors_that_may_lose_bits, full_float32
from service.compilation.monitor.uncompiled_calls import Calls, counted_calls
from service.compilation.program import Program
from service.compilation.run.built_program import BuiltProgram, StepRecord, build, record_step
from service.compilation.run.oracles import Oracle, all_of, comparable, drifts, oracles_of, oracles_of_one, scale_of
from service.compilation.run.parity_settings import SETTINGS
from service.compilation.run.recorded_run import (
    KeptStates,
    RecordedRun,
    Snapshot,
    record_run,
    record_uncompiled,
    states_to_keep,
)
from service.compilation.run.sampling import Key, is_left_behind
from service.compilation.rungs import Rung
from service.jobs.spec.compile import Phase

_OTHER_SEED = 2**31 - 1
"""A seed that no iteration has."""
_ROUNDING = 1e-5
"""The distance of results, as a fraction of their size, up to which they are the same except for rounding."""


class UncompiledError(Exception):
    """The program does not run uncompiled; the message says why."""


class Reference(Protocol):
    """What a compiled run starts from, and is judged by, which may still be in the making."""

    @property
    def eager(self) -> RecordedRun:
        """Return the uncompiled run from whose states all others start."""

    def precision(self) -> AbstractContextManager[None]:
        """Forbid TF32, within, if it would hide errors."""

    def completed(self) -> Baseline:
        """Return the baseline once it has been made. Raises :class:`UncompiledError`."""


@dataclass(frozen=True)
class FirstRun:
    """The first uncompiled run, and what it has shown of the program."""

    eager: RecordedRun
    calls: Calls
    differentiable: bool
    """Whether gradients flow through any module to compile."""
    recomputes: bool
    name: str = field(default_factory=lambda: uuid4().hex)
    """Tells it from the first runs of other processes: a baseline belongs to one of them."""


@dataclass(frozen=True)
class Baseline:
    """What a compiled run is compared with: the uncompiled run, and an oracle for each of its tensors."""

    eager: RecordedRun
    oracles: tuple[Mapping[Key, Oracle], ...]
    """How to judge each tensor, for each of ``eager.tensors``."""
    drifts: tuple[float | None, ...]
    """For a free iteration, how far eager has moved from float64 by then, as a fraction of a tensor's size; ``None``
    for other iterations, without float64, and where an error would no longer show.
    """
    truth_note: str
    """Why float64 does not compute the same results; empty if it does."""
    noise: float
    """The largest distance between two eager runs, as a fraction of a tensor's size."""
    overwritten: tuple[str, ...]
    """Inputs that the program updates in place."""
    peak: Peak | None
    calls: Calls
    """How the program calls the modules to compile."""
    recomputes: bool
    """Whether the program checkpoints activations."""
    backwards_due: tuple[bool, ...]
    """For each iteration, whether a compiled backward should run: when eager steps with gradients, or always if
    it never does; never if no gradient flows through the compiled modules, such as through a frozen backbone.
    """
    rounding_only: frozenset[str]
    """Parameters whose gradients are nothing but rounding: chance decides whether updates move them."""
    device: torch.device
    """The program's, which compares large tensors."""
    rounds_to_tf32: bool
    """Whether TF32 is allowed and changes anything."""
    hidden_by_tf32: float = 0.0
    """How far TF32 moves eager's results, as a fraction of their size, if errors could hide in that: everything else is
    then in full float32.
    """
    unused: frozenset[str] = frozenset()
    """Parameters without a gradient that affect no loss, if that has been examined."""

    @property
    def iterations(self) -> int:
        """Return how many iterations are judged."""
        return len(self.eager.records)

    def precision(self) -> AbstractContextManager[None]:
        """Forbid TF32, within, if it would hide errors."""
        return full_float32() if self.hidden_by_tf32 else nullcontext()

    def completed(self) -> Baseline:
        return self

    def begun_like(self, eager: RecordedRun) -> Baseline:
        """Return how to judge a run from other states, of which ``eager`` is the only uncompiled one."""
        oracles = tuple(
            oracles_of_one(found, found, {}, {key: oracle.allowed for key, oracle in known.items()}, self.device)
            for found, known in zip(eager.tensors, self.oracles, strict=True)
        )
        return replace(self, eager=eager, oracles=oracles, drifts=(None,) * len(oracles))


@dataclass(frozen=True)
class AwaitedBaseline:
    """A baseline whose first run is known, of a program that calls nothing in TF32 with any input shape; ``complete``
    awaits the rest.
    """

    first: FirstRun
    complete: Callable[[], Baseline]

    @property
    def eager(self) -> RecordedRun:
        return self.first.eager

    def precision(self) -> AbstractContextManager[None]:
        return nullcontext()

    def completed(self) -> Baseline:
        return self._made

    @cached_property
    def _made(self) -> Baseline:
        return self.complete()


def draws_like(eager: RecordedRun, rung: Rung) -> bool:
    """Return whether the rung is compared with eager's own draws, which generated code has in no job."""
    return rung.compiles_backward and eager.random


def random_numbers(eager: RecordedRun, rung: Rung) -> AbstractContextManager[Any]:
    """Make generated code draw the same random numbers as eager, within, if it draws any."""
    return eager_random_numbers() if draws_like(eager, rung) else nullcontext()


def make_baseline(
    program: Program,
    phase: Phase,
    iterations: int,
    on_any: Callable[[bool], bool] = lambda flag: flag,
    tells: Callable[[str], None] = lambda name: None,
) -> Baseline:
    """Run ``program`` uncompiled as often as it takes to judge a compiled run; raises the program's errors.

    ``on_any`` returns whether a condition of this rank holds on any of the ranks that run together; ``tells`` is called
    with the name of each run. If TF32 would hide errors, everything runs again in full float32, and rungs must too.
    """
    runs = UncompiledRuns(program, phase, iterations, on_any, tells)
    return runs.complete(runs.begin())


@dataclass(frozen=True)
class Visit:
    """What a process has found out before the first run is known."""

    start: Snapshot | None
    """The state of a new build; ``None`` if states are handed on."""
    loses_bits: bool
    """Whether the program calls what may be computed in TF32, or cannot be watched: the first run may then not be the
    one that counts.
    """


@dataclass(frozen=True)
class UncompiledRuns:
    """The program and phase to run, and whom to ask and tell meanwhile."""

    program: Program
    phase: Phase
    iterations: int
    on_any: Callable[[bool], bool]
    tells: Callable[[str], None]
    each_makes_states: bool = False
    """Whether each process that needs the states makes them, since they are too large to be handed on."""

    def visit(self) -> Visit:
        """Run the program once with each input shape, so that its first run in this process is no compiled one."""
        self.tells(f"{self.phase}: each shape once, uncompiled")
        if not (factors := factors_that_may_lose_bits(self.program.device)):
            return Visit(self._run_each_shape(), loses_bits=False)
        try:
            with FactorsSeen(factors) as seen:
                start = self._run_each_shape()
        except Exception as error:  # of a program that runs under no such watch, or not at all
            raise_host_fault(error)
            return Visit(self._run_each_shape(), loses_bits=True)
        return Visit(start, bool(seen.calls))

    def _run_each_shape(self) -> Snapshot | None:
        built = build(self.program, self.phase)
        start = Snapshot.of(built, self._states_to_keep(built).place) if self.each_makes_states else None
        for number in range(self.program.period):
            record_step(built, number)
        return start

    def _states_to_keep(self, built: BuiltProgram) -> KeptStates:
        return states_to_keep(built, self.iterations, self.on_any, is_varied=self.each_makes_states)

    def begin(self) -> FirstRun:
        """Make the run whose states all others start from, and count its calls."""
        self.tells(f"{self.phase}: eager PyTorch")
        built = build(self.program, self.phase)
        with counted_checkpoints() as checkpoints, counted_calls(built.parts.units()) as calls:
            eager = record_run(built, self.iterations, keeping=self._states_to_keep)
        return FirstRun(eager, dict(calls), bool(calls.differentiable), bool(checkpoints))

    def complete(self, first: FirstRun) -> Baseline:
        """Make the other runs, and compare them; anew in full float32 if TF32 would hide errors."""
        found = self._complete(first)
        moved = _moved_by_tf32(found)
        if not self.on_any(moved > SETTINGS.tf32_limit):
            return found
        with full_float32():
            return replace(self._complete(self.begin()), hidden_by_tf32=moved)

    def _complete(self, first: FirstRun) -> Baseline:
        eager = first.eager
        self.tells(f"{self.phase}: eager PyTorch again")
        again, memory = self._record_again(eager)
        redrawn = record_step(build(self.program, self.phase), _OTHER_SEED) if self.on_any(eager.random) else None
        self.tells(f"{self.phase}: float64")
        factors = factors_that_may_lose_bits(self.program.device)
        with FactorsSeen(factors) if factors else nullcontext() as seen:
            truth, note = self._record_truth(eager)
        multiplies = bool(factors) and (truth is None or bool(seen and seen.calls))
        if truth is not None and redrawn is not None and not _draw_alike(eager.records[0], truth.records[0], redrawn):
            truth, note = None, "float64 draws other random numbers"
        tf32 = self._record_tf32(eager, factors) if multiplies else None
        self.tells(f"{self.phase}: comparing the uncompiled runs")
        return replace(self._compare(first, again, truth, tf32), truth_note=note, peak=memory)

    def _compare(
        self,
        first: FirstRun,
        again: RecordedRun,
        truth: RecordedRun | None,
        tf32: tuple[RecordedRun, RecordedRun] | None,
    ) -> Baseline:
        eager = first.eager
        apart = (tf32[0].tensors, tf32[1].tensors) if tf32 else None
        device, exact = self.program.device, truth.tensors if truth else None
        oracles = oracles_of(eager.tensors, again.tensors, exact, apart, device)
        overwritten = frozenset[str]().union(*(each.overwritten for each in eager.records))
        judged = all_of(oracles[: self.iterations + 1])  # free iterations magnify their noise
        return Baseline(
            eager,
            oracles,
            drifts(oracles, self.iterations) if truth else (None,) * len(oracles),
            truth_note="",
            noise=max((each.fraction(each.noise) for each in judged), default=0.0),
            overwritten=tuple(sorted(overwritten)),
            peak=None,
            calls=first.calls,
            recomputes=first.recomputes,
            backwards_due=_backwards_due(eager, differentiable=first.differentiable),
            rounding_only=_rounding_only(oracles[: self.iterations]),
            device=device,
            rounds_to_tf32=tf32 is not None,
        )

    def _record_again(self, eager: RecordedRun) -> tuple[RecordedRun, Peak | None]:
        """Record the run once more: its distance from the first is noise, and its memory that of eager."""
        besides = allocated_bytes(self.program.device)
        reset_peak(self.program.device)
        again = self._record_from(eager)
        return again, peak(self.program.device, besides)

    def _record_from(self, eager: RecordedRun, dtype: torch.dtype = torch.float32) -> RecordedRun:
        return record_uncompiled(self.program, self.phase, self.iterations, eager.starts, dtype)

    def _record_truth(self, eager: RecordedRun) -> tuple[RecordedRun | None, str]:
        """Return the float64 run, or why eager cannot be measured against one."""
        try:
            truth = self._record_from(eager, torch.float64)
        except Exception as error:  # any error by which a program refuses it
            raise_host_fault(error)
            what = ": ".join(each for each in (type(error).__name__, first_line(str(error))) if each)
            return None, f"the model does not run in float64 ({what})"
        for index in range(self.iterations):
            for key, value in eager.tensors[index].items():
                exact = truth.tensors[index].get(key)
                if key[0] == "output" and value.is_floating_point() and (exact is None or not comparable(value, exact)):
                    what = f"{key[1]} of iteration {index} is another computation in float64"
                    return None, f"{what} (random draws differ?)"
        return truth, ""

    def _record_tf32(
        self, eager: RecordedRun, factors: Mapping[str, tuple[int, ...]]
    ) -> tuple[RecordedRun, RecordedRun] | None:
        """Return eager in full float32, and with factors rounded to TF32; ``None`` if that rounds nothing.

        Which of the two the device itself uses for a convolution depends on its shape and layout, so a compiled program
        may get the other one.
        """
        with InTf32(factors) as mode:
            found = self._record_from(eager)
        if not mode.rounded:
            return None
        with full_float32():
            return self._record_from(eager), found


def _moved_by_tf32(baseline: Baseline) -> float:
    """Return how far TF32 moves eager's results at most, as a fraction of a tensor's size: infinitely far for whole
    numbers, which it must not move. What steps leave behind follows from the results that are asked here.
    """
    of_steps = baseline.oracles[: baseline.iterations]
    judged = [each for found in of_steps for key, each in found.items() if not is_left_behind(key[0])]
    if any(each.allowed.rms and not each.eager.is_floating_point() for each in judged):
        return math.inf
    return max((each.fraction(each.allowed) for each in judged), default=0.0)


def _backwards_due(eager: RecordedRun, *, differentiable: bool) -> tuple[bool, ...]:
    steps = [len(record.missing) < len(eager.parameters) for record in eager.records]
    return tuple(differentiable and (step or not any(steps)) for step in steps)


def _rounding_only(oracles: Iterable[Mapping[Key, Oracle]]) -> frozenset[str]:
    """Return the parameters whose gradients are nothing but rounding in every iteration that has them."""
    found: dict[str, bool] = {}
    for each in oracles:
        for (kind, name), oracle in each.items():
            if kind == "gradient":
                found[name] = found.get(name, True) and oracle.is_rounding
    return frozenset(name for name, only in found.items() if only)


def _draw_alike(eager: StepRecord, truth: StepRecord, redrawn: StepRecord) -> bool:
    """Return whether float64 is much nearer to eager than eager is to itself with other draws, unless these do not
    matter: a result of other random numbers is not told from one of another precision by its distance alone.
    """
    by_draws, by_type = (_apart(eager.tensors, each.tensors) for each in (redrawn, truth))
    return not by_draws or by_type <= max(by_draws / 4, _ROUNDING)


def _apart(one: Mapping[Key, Tensor], other: Mapping[Key, Tensor]) -> float:
    """Return how far results of an iteration are apart at most, as a fraction of the largest of their kind."""
    shared = [key for key in one.keys() & other.keys() if one[key].shape == other[key].shape]
    largest: dict[str, float] = defaultdict(float)
    for kind, name in shared:
        largest[kind] = max(largest[kind], scale_of(one[kind, name]))
    parts = (scale_of(one[key].double() - other[key].double()) / largest[key[0]] for key in shared if largest[key[0]])
    return max(parts, default=0.0)
