"""Makes the uncompiled runs that judge a compiled one: eager, eager again for its noise, and float64 for the truth."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from service.compilation.host_fault import raise_host_fault
from service.compilation.monitor.uncompiled_calls import CallCounts, Calls, counted_calls
from service.compilation.program import Program
from service.compilation.run.parity import SETTINGS, Oracle, comparable, is_rounding, noise_of, scale_of, terms_scale
from service.compilation.run.program_run import ProgramRun, StepRecord, build, generator_state, record_step, units_of
from service.compilation.run.same_draws import draw_alike
from service.compilation.run.sampling import Key
from service.compilation.run.state import Snapshot, state_of
from service.compilation.torch_internals.checkpoints import counted_checkpoints
from service.compilation.torch_internals.profile import Peak, peak, reset_peak
from service.compilation.torch_internals.text import first_line
from service.compilation.torch_internals.tf32 import InTf32, factors_that_may_lose_bits, full_float32
from service.jobs.spec.compile import Phase

NOTHING = torch.empty(0)
_OTHER = 2**31 - 1
"""A seed that no iteration has."""
FREE = " (running on)"
"""Follows the kind of a tensor of an iteration that goes on from the one before."""
_HOST_SHARE = 0.25
"""The part of the host's free memory that states of the uncompiled run may take."""
_TRAJECTORY = "trajectory"
"""The kind of tensors made of the losses of iterations that go on from each other."""


@dataclass(frozen=True)
class Run:
    """Iterations of one program run, with its trainable parameters and buffers before and after them.

    ``end``: parameters and buffers after the free iterations that followed, whose losses are in ``trajectory``, and
    whose other results in ``free``. ``starts``: the states that iterations began with, in turn. ``random``: random
    numbers were drawn. ``unsharded``: parameters that FSDP did not put back among the ranks.
    """

    records: tuple[StepRecord, ...]
    before: dict[Key, Tensor]
    after: dict[Key, Tensor]
    end: dict[Key, Tensor]
    trajectory: dict[Key, Tensor]
    free: tuple[dict[Key, Tensor], ...] = ()
    starts: tuple[Snapshot, ...] = field(default=(), repr=False)
    random: bool = False
    unsharded: frozenset[str] = frozenset()

    def tensors(self, iteration: int) -> dict[Key, Tensor]:
        """Return the results of an iteration. Behind the iterations come parameters, buffers and trajectory as one
        more, then the free iterations.
        """
        if iteration < len(self.records):
            return self.records[iteration].tensors
        beyond = iteration - len(self.records)
        return self.free[beyond - 1] if beyond else self.after | self.trajectory

    @property
    def compared(self) -> range:
        """The iterations that :meth:`tensors` knows."""
        return range(len(self.records) + 1 + len(self.free))

    @property
    def missing(self) -> frozenset[str]:
        """Trainable parameters that got no gradient in any iteration."""
        sets = [record.missing for record in self.records]
        return frozenset.intersection(*sets) if sets else frozenset()

    def unreached_beside(self, eager: Run) -> frozenset[str]:
        """Return the parameters that no iteration reached, and those that some iteration missed although eager's
        reached them, as the graph of one shape may.
        """
        lost = (mine.missing - theirs.missing for mine, theirs in zip(self.records, eager.records, strict=True))
        return self.missing.union(*lost)

    def drew_otherwise_than(self, eager: Run) -> bool:
        """Return whether any iteration left the generator of random numbers in another state than eager's did."""
        pairs = zip(self.records, eager.records, strict=False)
        return any(not torch.equal(mine.generator, theirs.generator) for mine, theirs in pairs)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the trainable parameters."""
        return tuple(name for kind, name in self.before if kind == "parameter")

    @property
    def moved(self) -> frozenset[str]:
        """Trainable parameters that the updates changed."""
        own = frozenset(self.parameters)
        changed = (key for key, value in self.before.items() if not torch.equal(value, self.end[key]))
        return frozenset(name for kind, name in changed if name in own and kind.startswith("parameter"))


@dataclass(frozen=True)
class Reference:
    """``truth`` is ``None`` where float64 does not compute the same thing (``truth_note`` says why).

    ``overwritten``: inputs that the program updates in place. ``calls``: how it calls the modules that are to be
    compiled. ``recomputes``: it checkpoints activations.
    """

    eager: Run
    again: Run
    truth: Run | None
    truth_note: str
    overwritten: tuple[str, ...]
    peak: Peak | None
    calls: Calls = field(default_factory=dict)
    recomputes: bool = False
    differentiable: bool = True
    """Whether gradients flow back through any of those modules."""
    tf32: tuple[Run, Run] | None = None
    """Eager in full float32 and in TF32, where that is allowed and changes anything."""
    hidden_by_tf32: float = 0.0
    """How far TF32 moves eager's results, as a part of their size, if errors could hide in that: everything else is
    then in full float32.
    """
    unused: frozenset[str] = frozenset()
    """Parameters without a gradient of which no loss depends, where that has been looked into."""
    _oracles: dict[int, dict[Key, Oracle]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def noise(self) -> float:
        """Return the largest distance of two eager runs, as a part of a tensor's size."""
        every = (each for index in range(len(self.eager.records) + 1) for each in self.oracles(index).values())
        return max((each.noise.rms / each.scale for each in every if each.noise.rms), default=0.0)

    @property
    def backwards_due(self) -> tuple[bool, ...]:
        """Return for each iteration whether a compiled backward should run: where eager steps with gradients, or always
        if it never does; never if no gradient flows through the compiled modules, as through a frozen backbone.
        """
        steps = [len(record.missing) < len(self.eager.parameters) for record in self.eager.records]
        return tuple(self.differentiable and (step or not any(steps)) for step in steps)

    @property
    def rounding_only(self) -> frozenset[str]:
        """Return the parameters whose gradients are nothing but rounding: chance decides whether updates move them."""
        found: dict[str, bool] = {}
        for iteration in range(len(self.eager.records)):
            for (kind, name), oracle in self.oracles(iteration).items():
                if kind == "gradient":
                    found[name] = found.get(name, True) and is_rounding(oracle.eager, oracle.truth)
        return frozenset(name for name, only in found.items() if only)

    def oracles(self, iteration: int) -> dict[Key, Oracle]:
        """Return how to judge each tensor of an iteration; every rung is judged by the same."""
        if iteration not in self._oracles:
            self._oracles[iteration] = self._judging(iteration)
        return self._oracles[iteration]

    @property
    def moved_by_tf32(self) -> float:
        """Return how far TF32 moves eager's results at most, as a part of a tensor's size; it must not move whole
        numbers.
        """
        every = [each for index in range(len(self.eager.records)) for each in self.oracles(index).values()]
        parts = (each.allowed.rms / each.scale for each in every if each.allowed.rms and each.eager.is_floating_point())
        whole = any(each.allowed.rms and not each.eager.is_floating_point() for each in every)
        return math.inf if whole else max(parts, default=0.0)

    def drift(self, iteration: int) -> float | None:
        """Return how far eager has moved from float64 by this free iteration, as a part of a tensor's size; ``None`` if
        that is unknown, or so far that an error would not show.
        """
        first = len(self.eager.records) + 1
        if self.truth is None or iteration < first:
            return None
        furthest = max((self._apart(index) for index in range(first, iteration + 1)), default=0.0)
        return furthest if furthest <= SETTINGS.drift_limit else None

    def _apart(self, iteration: int) -> float:
        """Return how far eager and float64, or two eager runs, are apart in an iteration."""
        pairs = [each for each in self.oracles(iteration).values() if each.eager.is_floating_point() and each.scale]
        known = [each for each in pairs if each.truth is not None and each.truth.shape == each.eager.shape]
        apart = (
            scale_of(each.eager.double() - each.truth.double()) / each.scale for each in known if each.truth is not None
        )
        of_eager = (max(each.noise.rms, each.allowed.rms) / each.scale for each in pairs)
        return max((*apart, *of_eager), default=0.0)

    def _judging(self, iteration: int) -> dict[Key, Oracle]:
        eager, again = self.eager.tensors(iteration), self.again.tensors(iteration)
        truth = self.truth.tensors(iteration) if self.truth else {}
        full, rounded = (each.tensors(iteration) for each in self.tf32) if self.tf32 else (eager, eager)
        scales = {key: scale_of(value) for key, value in eager.items()}
        largest = {kind: max(scale for (k, _), scale in scales.items() if k == kind) for kind, _ in scales}
        return {
            key: Oracle(
                value,
                truth.get(key),
                SETTINGS.judged_scale(scales[key], largest[key[0]], terms_scale(value, truth.get(key))),
                noise_of(value, again.get(key, NOTHING)),
                allowed=noise_of(full.get(key, NOTHING), rounded.get(key, NOTHING)),
            )
            for key, value in eager.items()
        }


def run_reference(
    program: Program, phase: Phase, iterations: int, on_any: Callable[[bool], bool] = lambda flag: flag
) -> Reference:
    """Run ``program`` uncompiled three times, and once more if it draws random numbers; raises what the program raises.
    ``on_any`` returns whether a condition of this rank holds on any of the ranks that run together. If TF32 would hide
    errors, everything runs again in full float32, and rungs must too.
    """
    found = _reference(program, phase, iterations, on_any)
    moved = found.moved_by_tf32
    if not on_any(moved > SETTINGS.tf32_limit):
        return found
    with full_float32():
        return replace(_reference(program, phase, iterations, on_any), hidden_by_tf32=moved)


def _reference(program: Program, phase: Phase, iterations: int, on_any: Callable[[bool], bool]) -> Reference:
    reset_peak(program.device)
    with counted_checkpoints() as checkpoints:
        eager, calls = _first(program, phase, iterations, on_any)
    memory = peak(program.device)
    again = run(build(program, phase), iterations, eager.starts)
    redrawn = _redrawn(program, phase) if on_any(eager.random) else None
    truth, note = _truth(program, phase, iterations, eager)
    if truth is not None and redrawn is not None and not draw_alike(eager.records[0], truth.records[0], redrawn):
        truth, note = None, "float64 draws other random numbers"
    overwritten = frozenset[str]().union(*(each.overwritten for each in eager.records))
    tf32 = _in_tf32(program, phase, iterations, eager)
    return Reference(
        eager,
        again,
        truth,
        note,
        tuple(sorted(overwritten)),
        memory,
        calls,
        bool(checkpoints),
        bool(calls.differentiable),
        tf32,
    )


def _in_tf32(program: Program, phase: Phase, iterations: int, eager: Run) -> tuple[Run, Run] | None:
    """Return eager in full float32, and with factors rounded to TF32; ``None`` where TF32 is not allowed or rounds
    nothing. Which of the two the device itself uses for a convolution depends on its shape and layout.
    """
    factors = factors_that_may_lose_bits(program.device)
    if not factors:
        return None
    with InTf32(factors) as mode:
        found = run(build(program, phase), iterations, eager.starts)
    if not mode.rounded:
        return None
    with full_float32():
        return run(build(program, phase), iterations, eager.starts), found


def _first(program: Program, phase: Phase, iterations: int, on_any: Callable[[bool], bool]) -> tuple[Run, CallCounts]:
    program_run = build(program, phase)
    with counted_calls(units_of(program_run.parts)) as calls:
        return run(program_run, iterations, most=_most_starts(program_run, iterations, on_any)), calls


def _most_starts(program_run: ProgramRun, iterations: int, on_any: Callable[[bool], bool]) -> int:
    """Return how many states to keep: one for each iteration, or two, in turns, where the host lacks the memory."""
    with_optimizers = 3 * Snapshot.of(program_run).size  # most keep two moments of each parameter
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2 if on_any(iterations * with_optimizers > _HOST_SHARE * available) else iterations


def run(program_run: ProgramRun, iterations: int, starts: Sequence[Snapshot] = (), most: int | None = None) -> Run:
    """Run and record ``iterations`` by :func:`follow`, each with a seed of its own."""
    draws: list[bool] = []

    def step(iteration: int) -> StepRecord:
        seed(iteration)
        fresh = generator_state(program_run.program.device)
        seen = record_step(program_run)
        draws.append(not torch.equal(fresh, seen.generator))
        return seen

    return replace(follow(program_run, iterations, step, starts, most), random=any(draws))


def follow(
    program_run: ProgramRun,
    iterations: int,
    step: Callable[[int], StepRecord],
    starts: Sequence[Snapshot] = (),
    most: int | None = None,
) -> Run:
    """Let ``step`` run and record each iteration, by its number.

    In training each of ``iterations`` begins with a state of the uncompiled run, so that later steps magnify no
    difference, and with another state than the one before, so that a value left over from that is wrong even where a
    batch repeats. Without ``starts`` this is the uncompiled run, and keeps ``most`` of its states (by default one for
    each iteration), which later iterations take in turn. As many free iterations then go on from each other, as a job's
    do.
    """
    if program_run.phase == "inference":
        return _follow_inference(program_run, iterations, step, starts)
    before = state_of(program_run)
    known, records = list(starts), []
    for iteration in range(iterations):
        if not starts and iteration < (most or iterations):
            known.append(Snapshot.of(program_run))
        else:
            known[iteration % len(known)].restore(program_run)
        records.append(step(iteration))
    after = state_of(program_run)
    known[0].restore(program_run)
    free = [step(iteration).tensors for iteration in range(iterations, 2 * iterations)]
    return Run(
        tuple(records),
        before,
        after,
        state_of(program_run),
        _trajectory(free),
        free=tuple({(kind + FREE, name): value for (kind, name), value in each.items()} for each in free),
        starts=tuple(known),
        unsharded=program_run.unsharded,
    )


def _follow_inference(
    program_run: ProgramRun, iterations: int, step: Callable[[int], StepRecord], starts: Sequence[Snapshot]
) -> Run:
    """Let ``step`` run each iteration once: none changes parameters. With the same parameters and a repeated batch, a
    value left over from the iteration before would be right, so they are varied a little, or taken from several
    ``starts``.
    """
    before, records = state_of(program_run), []
    beginning = starts[0] if starts else Snapshot.of(program_run)
    for iteration in range(iterations):
        if len(starts) > 1:
            starts[iteration % len(starts)].restore(program_run)
        else:
            beginning.vary(program_run, iteration)
        records.append(step(iteration))
    after = state_of(program_run)
    return Run(tuple(records), before, after, after, {}, starts=(beginning,), unsharded=program_run.unsharded)


def _trajectory(free: Sequence[Mapping[Key, Tensor]]) -> dict[Key, Tensor]:
    """Return each loss over time as one tensor: a single number may come close to the truth by chance."""
    names = dict.fromkeys(name for tensors in free for kind, name in tensors if kind == "loss")
    series = {
        name: [tensors["loss", name].flatten() for tensors in free if ("loss", name) in tensors] for name in names
    }
    return {(_TRAJECTORY, name): torch.cat(values) for name, values in series.items()}


def seed(iteration: int) -> None:
    """Seed the iteration, in the same way for all runs."""
    torch.manual_seed(iteration)


def _truth(program: Program, phase: Phase, iterations: int, eager: Run) -> tuple[Run | None, str]:
    """Return the float64 run, or why eager cannot be measured against one."""
    try:
        truth = run(build(program, phase, dtype=torch.float64), iterations, eager.starts)
    except Exception as error:  # whatever a program refuses it with
        raise_host_fault(error)
        what = ": ".join(each for each in (type(error).__name__, first_line(str(error))) if each)
        return None, f"the model does not run in float64 ({what})"
    for index in range(iterations):
        for key, value in eager.tensors(index).items():
            exact = truth.tensors(index).get(key)
            if key[0] == "output" and value.is_floating_point() and (exact is None or not comparable(value, exact)):
                return None, f"{key[1]} of iteration {index} is another computation in float64 (random draws differ?)"
    return truth, ""


def _redrawn(program: Program, phase: Phase) -> StepRecord:
    """Return the first iteration with other random numbers."""
    program_run = build(program, phase)
    seed(_OTHER)
    return record_step(program_run)
