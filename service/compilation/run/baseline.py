"""Makes the uncompiled runs by which a compiled one is judged: eager, eager again for its noise, and float64 for the
truth.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from service.compilation.host_fault import raise_host_fault
from service.compilation.instruments.checkpoints import counted_checkpoints
from service.compilation.instruments.profile import Peak, peak, reset_peak, used
from service.compilation.instruments.text import first_line
from service.compilation.instruments.tf32 import FactorsSeen, InTf32, factors_that_may_lose_bits, full_float32
from service.compilation.monitor.uncompiled_calls import CallCounts, Calls, counted_calls
from service.compilation.program import Program
from service.compilation.run.built_program import ProgramRun, StepRecord, build, generator_state, record_step, units_of
from service.compilation.run.oracles import all_of, drifts, judging, oracles_of, part
from service.compilation.run.parity import SETTINGS, Oracle, comparable
from service.compilation.run.recorded_run import HOST, Snapshot, size_of, state_of
from service.compilation.run.same_draws import draw_alike
from service.compilation.run.sampling import Key
from service.jobs.spec.compile import Phase

_OTHER = 2**31 - 1
"""A seed that no iteration has."""
_FREE = " (running on)"
"""Follows the kind of a tensor of an iteration that continues the previous one."""
_SHARES = {"cuda": 0.2, "cpu": 0.25}
"""The share of a device's free memory that states of the uncompiled run may take. Six processes may share a GPU."""
_TRAJECTORY = "trajectory"
"""The kind of tensors made of the losses of iterations that continue each other."""


@dataclass(frozen=True)
class Run:
    """Iterations of one program run, and their results.

    ``tensors``: the results of each of ``records``, then its parameters, buffers and trajectory as one more, then the
    results of the free iterations that followed. ``parameters`` are trainable; ``moved``: those that the updates
    changed; ``missing``: those that got no gradient in any iteration; ``unsharded``: those that FSDP did not put back
    among the ranks. ``starts``: the states with which iterations began, in turn. ``random``: random numbers were drawn.
    """

    records: tuple[StepRecord, ...]
    tensors: tuple[Mapping[Key, Tensor], ...]
    parameters: tuple[str, ...]
    moved: frozenset[str]
    missing: frozenset[str]
    unsharded: frozenset[str]
    starts: tuple[Snapshot, ...] = field(repr=False)
    random: bool = False


@dataclass(frozen=True)
class Reference:
    """Says how to judge each tensor of a compiled run: by the one of ``oracles`` with the same iteration and key.

    ``drifts``, for a free iteration: how far eager has moved from float64 by then, as a part of a tensor's size;
    ``None`` if that is unknown, or so far that an error would not show. ``truth_note`` says why float64 does
    not compute the same results, if so. ``noise``: the largest distance of two eager runs, as a part of a
    tensor's size. ``overwritten``: inputs that the program updates in place. ``calls``: how it calls the
    modules to compile. ``recomputes``: it checkpoints activations.
    """

    eager: Run
    oracles: tuple[Mapping[Key, Oracle], ...]
    drifts: tuple[float | None, ...]
    truth_note: str
    noise: float
    overwritten: tuple[str, ...]
    peak: Peak | None
    calls: Calls
    recomputes: bool
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
    """How far TF32 moves eager's results, relative to their size, if errors could hide in that: everything else
    is then in full float32.
    """
    unused: frozenset[str] = frozenset()
    """Parameters without a gradient that affect no loss, if that has been examined."""


def run_reference(
    program: Program,
    phase: Phase,
    iterations: int,
    on_any: Callable[[bool], bool] = lambda flag: flag,
    tells: Callable[[str], None] = lambda name: None,
) -> Reference:
    """Run ``program`` uncompiled three times, and once more if it draws random numbers; raises the program's errors.
    ``on_any`` returns whether a condition of this rank holds on any of the ranks that run together; ``tells`` is called
    with the name of each run. If TF32 would hide errors, everything runs again in full float32, and rungs must too.
    """
    found = _reference(program, phase, iterations, on_any, tells)
    moved = _moved_by_tf32(found)
    if not on_any(moved > SETTINGS.tf32_limit):
        return found
    with full_float32():
        return replace(_reference(program, phase, iterations, on_any, tells), hidden_by_tf32=moved)


def _reference(
    program: Program, phase: Phase, iterations: int, on_any: Callable[[bool], bool], tells: Callable[[str], None]
) -> Reference:
    tells(f"{phase}: eager PyTorch")
    with counted_checkpoints() as checkpoints:
        eager, calls = _first(program, phase, iterations, on_any)
    tells(f"{phase}: eager PyTorch again")
    besides = used(program.device)
    reset_peak(program.device)
    again = run(build(program, phase), iterations, eager.starts)
    memory = peak(program.device, besides)
    redrawn = _redrawn(program, phase) if on_any(eager.random) else None
    tells(f"{phase}: float64")
    factors = factors_that_may_lose_bits(program.device)
    with FactorsSeen(factors) if factors else nullcontext() as seen:
        truth, note = _truth(program, phase, iterations, eager)
    multiplies = bool(factors) and (truth is None or bool(seen and seen.calls))
    if truth is not None and redrawn is not None and not draw_alike(eager.records[0], truth.records[0], redrawn):
        truth, note = None, "float64 draws other random numbers"
    overwritten = frozenset[str]().union(*(each.overwritten for each in eager.records))
    tf32 = _in_tf32(program, phase, iterations, eager) if multiplies else None
    tells(f"{phase}: comparing the uncompiled runs")
    apart = (tf32[0].tensors, tf32[1].tensors) if tf32 else None
    exact = truth.tensors if truth else None
    oracles = oracles_of(eager.tensors, again.tensors, exact, apart, program.device)
    return Reference(
        eager,
        oracles,
        drifts(oracles, iterations) if truth else (None,) * len(oracles),
        note,
        noise=max((part(each.noise, each) for each in all_of(oracles[: iterations + 1])), default=0.0),
        overwritten=tuple(sorted(overwritten)),
        peak=memory,
        calls=calls,
        recomputes=bool(checkpoints),
        backwards_due=_backwards_due(eager, differentiable=bool(calls.differentiable)),
        rounding_only=_rounding_only(oracles[:iterations]),
        device=program.device,
        rounds_to_tf32=tf32 is not None,
    )


def _in_tf32(program: Program, phase: Phase, iterations: int, eager: Run) -> tuple[Run, Run] | None:
    """Return eager in full float32, and with factors rounded to TF32; ``None`` if that rounds nothing. Which of the two
    the device itself uses for a convolution depends on its shape and layout.
    """
    with InTf32(factors_that_may_lose_bits(program.device)) as mode:
        found = run(build(program, phase), iterations, eager.starts)
    if not mode.rounded:
        return None
    with full_float32():
        return run(build(program, phase), iterations, eager.starts), found


def _first(program: Program, phase: Phase, iterations: int, on_any: Callable[[bool], bool]) -> tuple[Run, CallCounts]:
    program_run = build(program, phase)
    with counted_calls(units_of(program_run.parts)) as calls:
        return run(program_run, iterations, keeping=_keeping(program_run, iterations, on_any)), calls


@dataclass(frozen=True)
class KeptStates:
    """Says how many states of the uncompiled run are kept, to be taken in turn, and in which ``place``."""

    most: int
    place: torch.device = HOST


def _keeping(program_run: ProgramRun, iterations: int, on_any: Callable[[bool], bool]) -> KeptStates:
    """Keep a state for each iteration, or two; on the device if it has room, else on the host."""
    with_optimizers = 3 * size_of(program_run)  # most keep two moments of each parameter
    for place in dict.fromkeys((program_run.program.device, HOST)):
        room = _SHARES[place.type] * _free(place)
        for most in (iterations, 2):
            if not on_any(most * with_optimizers > room):
                return KeptStates(most, place)
    return KeptStates(2)


def _free(place: torch.device) -> int:
    """Return the free bytes of a device's memory, with those that this process only keeps for its next tensors."""
    if place.type == "cuda":
        kept = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return torch.cuda.mem_get_info(place)[0] + kept
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def run(
    program_run: ProgramRun, iterations: int, starts: Sequence[Snapshot] = (), keeping: KeptStates | None = None
) -> Run:
    """Run and record ``iterations`` by :func:`follow`, each with a seed of its own."""
    draws: list[bool] = []

    def step(iteration: int) -> StepRecord:
        seed(iteration)
        fresh = generator_state(program_run.program.device)
        seen = record_step(program_run)
        draws.append(not torch.equal(fresh, seen.generator))
        return seen

    return replace(follow(program_run, iterations, step, starts, keeping), random=any(draws))


def follow(
    program_run: ProgramRun,
    iterations: int,
    step: Callable[[int], StepRecord],
    starts: Sequence[Snapshot] = (),
    keeping: KeptStates | None = None,
) -> Run:
    """Let ``step`` run and record each iteration, by its number.

    In training each of ``iterations`` begins with a state of the uncompiled run, so that later steps magnify no
    difference, and with a state different from the previous one's, so that a value left over from that is wrong
    even if a batch repeats. Without ``starts`` this is the uncompiled run, and keeps its states as ``keeping`` says (by
    default one for each iteration, on the host). As many free iterations then continue each other, like a job's.
    """
    keeping = keeping or KeptStates(iterations)
    if program_run.phase == "inference":
        beginning = starts or [Snapshot.of(program_run, keeping.place)]
        return _follow_inference(program_run, iterations, step, beginning)
    before = state_of(program_run)
    known, records = list(starts), []
    for iteration in range(iterations):
        if not starts and iteration < keeping.most:
            known.append(Snapshot.of(program_run, keeping.place))
        else:
            known[iteration % len(known)].restore(program_run)
        records.append(step(iteration))
    after = state_of(program_run)
    known[0].restore(program_run)
    free = [step(iteration).tensors for iteration in range(iterations, 2 * iterations)]
    left = after | _trajectory(free)
    running_on = ({(kind + _FREE, name): value for (kind, name), value in each.items()} for each in free)
    found = _told(program_run, records, before, state_of(program_run), known)
    return replace(found, tensors=(*found.tensors, left, *running_on))


def _follow_inference(
    program_run: ProgramRun, iterations: int, step: Callable[[int], StepRecord], starts: Sequence[Snapshot]
) -> Run:
    """Let ``step`` run each iteration once: none changes parameters. With the same parameters and a repeated batch, a
    value left over from the iteration before would be right, so they are varied a little, or taken from several
    ``starts``.
    """
    before, records = state_of(program_run), []
    for iteration in range(iterations):
        if len(starts) > 1:
            starts[iteration % len(starts)].restore(program_run)
        else:
            starts[0].vary(program_run, iteration)
        records.append(step(iteration))
    after = state_of(program_run)
    found = _told(program_run, records, before, after, starts[:1])
    return replace(found, tensors=(*found.tensors, after))


def _told(
    program_run: ProgramRun,
    records: Sequence[StepRecord],
    before: Mapping[Key, Tensor],
    end: Mapping[Key, Tensor],
    starts: Sequence[Snapshot],
) -> Run:
    """Return the run of these iterations, whose parameters and buffers were ``before`` and at the ``end`` as given."""
    parameters = tuple(name for kind, name in before if kind == "parameter")
    values = ((key, value) for key, value in before.items() if key[0].startswith("parameter"))
    return Run(
        tuple(records),
        tuple(record.tensors for record in records),
        parameters,
        frozenset(key[1] for key, value in values if not torch.equal(value, end[key])),
        frozenset.intersection(*(record.missing for record in records)) if records else frozenset(),
        program_run.unsharded,
        tuple(starts),
    )


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
    except Exception as error:  # any error by which a program refuses it
        raise_host_fault(error)
        what = ": ".join(each for each in (type(error).__name__, first_line(str(error))) if each)
        return None, f"the model does not run in float64 ({what})"
    for index in range(iterations):
        for key, value in eager.tensors[index].items():
            exact = truth.tensors[index].get(key)
            if key[0] == "output" and value.is_floating_point() and (exact is None or not comparable(value, exact)):
                return None, f"{key[1]} of iteration {index} is another computation in float64 (random draws differ?)"
    return truth, ""


def _redrawn(program: Program, phase: Phase) -> StepRecord:
    """Return the first iteration with other random numbers."""
    program_run = build(program, phase)
    seed(_OTHER)
    return record_step(program_run)


def judged_beside(eager: Run, reference: Reference) -> Reference:
    """Return how to judge a run that begins like ``eager``, which has neither a second run nor one in float64."""
    oracles = tuple(
        judging(found, found, {}, {key: oracle.allowed for key, oracle in known.items()}, reference.device)
        for found, known in zip(eager.tensors, reference.oracles, strict=True)
    )
    return replace(reference, eager=eager, oracles=oracles, drifts=(None,) * len(oracles))


def _moved_by_tf32(reference: Reference) -> float:
    """Return how far TF32 moves eager's results at most, as a part of a tensor's size: infinitely far for whole
    numbers, which it must not move.
    """
    judged = list(all_of(reference.oracles[: len(reference.eager.records)]))
    if any(each.allowed.rms and not each.eager.is_floating_point() for each in judged):
        return math.inf
    return max((part(each.allowed, each) for each in judged), default=0.0)


def _backwards_due(eager: Run, *, differentiable: bool) -> tuple[bool, ...]:
    steps = [len(record.missing) < len(eager.parameters) for record in eager.records]
    return tuple(differentiable and (step or not any(steps)) for step in steps)


def _rounding_only(oracles: Iterable[Mapping[Key, Oracle]]) -> frozenset[str]:
    found: dict[str, bool] = {}
    for each in oracles:
        for (kind, name), oracle in each.items():
            if kind == "gradient":
                found[name] = found.get(name, True) and oracle.is_rounding
    return frozenset(name for name, only in found.items() if only)
