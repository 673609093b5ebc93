"""Takes a built program through its iterations, each from a known state, and records their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from service.compilation.instruments.profile import free_bytes
from service.compilation.program import Program
from service.compilation.run.built_program import BuiltProgram, StepRecord, build, record_step
from service.compilation.run.sampling import (
    STATE,
    Key,
    copies_to_compare,
    has_arithmetic,
    is_equal,
    is_packed,
    local_part,
)
from service.jobs.spec.compile import Phase
from service.parallel.containers import tensors_in

HOST = torch.device("cpu")
_VARIED, _NEAR = 4, 256
"""The multiples of parameters that iterations take in turn, and the fraction of them by which one is above another."""
_MEMBERS = 10**6
"""More than any program has parameters."""
_FREE = " (running on)"
"""Follows the kind of a tensor of a free iteration, which continues the one before it."""
TRAJECTORY = "trajectory"
"""The kind of a tensor made of the losses of all free iterations."""
_SHARES = {"cuda": 0.2, "cpu": 0.25}
"""The share of a device's free memory that kept states may take. Six processes may share a GPU."""


@dataclass(frozen=True)
class RecordedRun:
    """A program's iterations and results. In training, free iterations follow, which continue each other."""

    records: tuple[StepRecord, ...]
    """The judged iterations."""
    tensors: tuple[Mapping[Key, Tensor], ...]
    """The results to compare: those of each of ``records``, with what the last one of each input shape left in buffers;
    then, as one more, the final parameters and buffers with the trajectory; then those of each free iteration.
    """
    parameters: tuple[str, ...]
    """The trainable parameters."""
    moved: frozenset[str]
    """Parameters that the updates changed."""
    missing: frozenset[str]
    """Parameters that got no gradient in any judged iteration."""
    unsharded: frozenset[str]
    """Parameters that FSDP has not put back among the ranks."""
    starts: tuple[Snapshot, ...] = field(repr=False)
    """The states with which iterations began, taken in turn."""
    random: bool
    """Whether any iteration drew random numbers."""

    @property
    def begins_anew(self) -> bool:
        """Return whether each of its states is that of a new build, or a multiple of it."""
        return all(start.values is self.starts[0].values for start in self.starts)

    def without_results(self) -> RecordedRun:
        """Return only what takes little memory."""
        return replace(self, records=(), tensors=(), starts=())


@dataclass(frozen=True)
class KeptStates:
    """How many states of an uncompiled run are kept, to be taken in turn by all later runs, and where."""

    most: int
    place: torch.device = HOST
    is_varied: bool = False
    """Whether only the first is kept, and multiples of its parameters are the others, if that is all that a step
    changes: then any process can make them.
    """


Keeping = Callable[[BuiltProgram], KeptStates]
"""Chooses before the first step and, now that optimizers hold their state, before the second."""


def record_uncompiled(
    program: Program, phase: Phase, iterations: int, starts: Sequence[Snapshot], dtype: torch.dtype = torch.float32
) -> RecordedRun:
    """Build the program uncompiled, and record a run of it that begins each iteration with one of ``starts``."""
    return record_run(build(program, phase, dtype=dtype), iterations, starts)


def record_run(
    built: BuiltProgram,
    iterations: int,
    starts: Sequence[Snapshot] = (),
    step: Callable[[BuiltProgram, int], StepRecord] = record_step,
    keeping: Keeping | None = None,
) -> RecordedRun:
    """Let ``step`` run and record each iteration, seeded by its number.

    Each begins with a state of the first uncompiled run, so that no difference grows from step to step. The states of
    two iterations in a row differ, so that a value left over from the one before is wrong even if a batch repeats.
    Without ``starts`` this is that first run: it keeps its states as ``keeping`` says, by default one for each
    iteration, on the host.
    """
    keeping = keeping or (lambda built: KeptStates(iterations))
    if built.phase == "inference":
        return _record_inference(built, iterations, step, starts or [Snapshot.of(built, keeping(built).place)])
    return _record_training(built, iterations, step, starts, keeping)


def _record_training(
    built: BuiltProgram,
    iterations: int,
    step: Callable[[BuiltProgram, int], StepRecord],
    starts: Sequence[Snapshot],
    keeping: Keeping,
) -> RecordedRun:
    """Record the judged iterations, then as many free ones."""
    before = _trained(built)
    known, judged, kept = list(starts), [], KeptStates(0)
    for iteration in range(iterations):
        if not starts and iteration < 2:  # from the second on, optimizers hold what they will
            kept = keeping(built)
            known = [each.to(kept.place) for each in known]
            if iteration and kept.is_varied and known[0].is_left_but_for_parameters(built):
                known, kept = [*known[0].varied()], replace(kept, most=0)
        if iteration < kept.most:
            known.append(Snapshot.of(built, kept.place))
        else:
            known[iteration % len(known)].restore(built)
        judged.append(_with_buffers(step(built, iteration), built, iterations - iteration))
    after = state_of(built)
    known[0].restore(built)
    free = [step(built, iteration) for iteration in range(iterations, 2 * iterations)]
    left = after | _trajectory([each.tensors for each in free])
    running_on = ({(kind + _FREE, name): value for (kind, name), value in each.tensors.items()} for each in free)
    found = _make_run(built, judged, before, _trained(built), known)
    random = found.random or any(each.drew for each in free)
    return replace(found, tensors=(*found.tensors, left, *running_on), random=random)


def _record_inference(
    built: BuiltProgram, iterations: int, step: Callable[[BuiltProgram, int], StepRecord], starts: Sequence[Snapshot]
) -> RecordedRun:
    """Record iterations that change no parameters, so that none is free.

    With the same parameters and a repeated batch, a value left over from the iteration before would be right. So the
    parameters are varied a little from iteration to iteration, or taken from several ``starts``.
    """
    before, judged = _trained(built), []
    for iteration in range(iterations):
        if len(starts) > 1:
            starts[iteration % len(starts)].restore(built)
        else:
            starts[0].vary(built, iteration)
        judged.append(_with_buffers(step(built, iteration), built, iterations - iteration))
    after = state_of(built)
    found = _make_run(built, judged, before, after, starts[:1])
    return replace(found, tensors=(*found.tensors, after))


def _with_buffers(record: StepRecord, built: BuiltProgram, left: int) -> StepRecord:
    """Return the record of a step with what it left in buffers, if it is the last of its input shape, and not of all
    ``left`` ones: each shape has code of its own, and the next iteration begins with other buffers.
    """
    if not 1 < left <= built.program.period:
        return record
    return replace(record, tensors=record.tensors | _copies(_untrained(built)))


def _make_run(
    built: BuiltProgram,
    judged: Sequence[StepRecord],
    before: Mapping[Key, Tensor],
    end: Mapping[Key, Tensor],
    starts: Sequence[Snapshot],
) -> RecordedRun:
    """Return the run of the ``judged`` iterations, whose trainable parameters were ``before``, and at the ``end``."""
    return RecordedRun(
        records=tuple(judged),
        tensors=tuple(record.tensors for record in judged),
        parameters=tuple(name for kind, name in before if kind == "parameter"),
        moved=frozenset(key[1] for key, value in before.items() if not torch.equal(value, end[key])),
        missing=frozenset.intersection(*(record.missing for record in judged)) if judged else frozenset(),
        unsharded=built.unsharded,
        starts=tuple(starts),
        random=any(record.drew for record in judged),
    )


def _trajectory(free: Sequence[Mapping[Key, Tensor]]) -> dict[Key, Tensor]:
    """Return each loss over time as one tensor: a single number may come close to the truth by chance."""
    names = dict.fromkeys(name for tensors in free for kind, name in tensors if kind == "loss")
    series = {
        name: [tensors["loss", name].flatten() for tensors in free if ("loss", name) in tensors] for name in names
    }
    return {(TRAJECTORY, name): torch.cat(values) for name, values in series.items()}


def states_to_keep(
    built: BuiltProgram, iterations: int, on_any: Callable[[bool], bool], *, is_varied: bool = False
) -> KeptStates:
    """Choose a state for each iteration, or two; on the program's device if it has room, else on the host.

    ``on_any`` returns whether a condition of this rank holds on any rank: all keep as many, in the same place.
    ``is_varied`` as in :class:`KeptStates`.
    """
    size = sum(map(_bytes, (*map(local_part, built.members), *_held_by_optimizers(built))))
    for place in dict.fromkeys((built.program.device, HOST)):
        room = _SHARES[place.type] * free_bytes(place)
        for most in (iterations, 2):
            if not on_any(most * size > room):
                return KeptStates(most, place, is_varied)
    return KeptStates(2, is_varied=is_varied)


def _bytes(value: Tensor) -> int:
    """Return its size; a sparse tensor does not tell its own."""
    return value.numel() * value.element_size()


def _held_by_optimizers(built: BuiltProgram) -> Iterator[Tensor]:
    held = (of for optimizer in built.parts.optimizers for of in optimizer.state.values())
    return (local_part(each) for each in tensors_in(list(held)))


def near_device(run: RecordedRun, device: torch.device) -> RecordedRun:
    """Return a run whose states were kept on the host with these on ``device``, if it has room."""
    size = sum(_bytes(value) for start in run.starts for value in start.values)
    if size > _SHARES[device.type] * free_bytes(device):
        return run
    return replace(run, starts=tuple(start.to(device) for start in run.starts))


def state_of(built: BuiltProgram) -> dict[Key, Tensor]:
    """Return all parameters and buffers in the form in which they are compared."""
    return _copies({"parameter": built.trainable, **_untrained(built)})


def _trained(built: BuiltProgram) -> dict[Key, Tensor]:
    return _copies({"parameter": built.trainable})


def _untrained(built: BuiltProgram) -> dict[str, Mapping[str, Tensor]]:
    """Return what no optimizer trains; a module may update it itself, as an average of others."""
    return {"buffer": built.buffers, "frozen parameter": built.frozen}


def _copies(of_kinds: Mapping[str, Mapping[str, Tensor]]) -> dict[Key, Tensor]:
    return copies_to_compare((kind, name, each) for kind, members in of_kinds.items() for name, each in members.items())


@dataclass(frozen=True)
class Snapshot:
    """Parameters, buffers and optimizers as they were, in the order in which every build of a program has them."""

    values: tuple[Tensor, ...]
    optimizers: tuple[dict[str, Any], ...]
    factor: float = 1.0
    """What floating-point parameters are multiplied by when they are restored."""

    @staticmethod
    def of(built: BuiltProgram, place: torch.device = HOST) -> Snapshot:
        """Copy the state to ``place``: the host, or the program's own device, from which restoring is much faster."""
        return Snapshot(
            tuple(local_part(each).to(place, copy=True) for each in built.members),
            tuple(_copy_state(each.state_dict(), place) for each in built.parts.optimizers),
        )

    def to(self, place: torch.device) -> Snapshot:
        """Return the same state in another place."""
        moved = tuple(value.to(place) for value in self.values)
        return replace(self, values=moved, optimizers=tuple(_copy_state(each, place) for each in self.optimizers))

    def restore(self, built: BuiltProgram) -> None:
        """Restore into any build of the program, of any precision, in place: compiled code knows tensors by address."""
        with torch.no_grad():
            for member, before in zip(built.members, self.values, strict=True):
                local_part(member).copy_(before * self.factor if self.factor != 1 and _is_varied(member) else before)
        for optimizer, held in zip(built.parts.optimizers, self.optimizers, strict=True):
            optimizer.load_state_dict(deepcopy(held))

    def shuffled(self, built: BuiltProgram, number: int) -> Snapshot:
        """Return the same with the elements of each parameter in another order, one for each ``number``."""
        generator = torch.Generator().manual_seed(number)
        pairs = zip(built.members, self.values, strict=True)
        return replace(self, values=tuple(_shuffle(each, before, generator) for each, before in pairs))

    def nudged(self, units: int) -> Snapshot:
        """Return the same with each number that is not a whole one moved by so many ``units`` in the last
        place, up or down at random.
        """
        return replace(self, values=tuple(_nudge(each, units, index) for index, each in enumerate(self.values)))

    def vary(self, built: BuiltProgram, iteration: int) -> None:
        """Set parameters to their first values times a number near 1, another in each of ``_VARIED`` iterations."""
        factor = 1 + (iteration % _VARIED) / _NEAR
        with torch.no_grad():
            for member, before in zip(built.members, self.values, strict=True):
                if _is_varied(member):
                    local_part(member).copy_(before * factor)

    def varied(self) -> tuple[Snapshot, Snapshot]:
        """Return the state, and the same with its parameters multiplied: two iterations in a row differ."""
        return self, replace(self, factor=1 + 1 / _NEAR)

    def is_left_but_for_parameters(self, built: BuiltProgram) -> bool:
        """Return whether the build has changed nothing else since: no buffer, and nothing that an optimizer holds."""
        rest = [pair for pair in zip(built.members, self.values, strict=True) if not _is_varied(pair[0])]
        return not any(each.state for each in built.parts.optimizers) and all(
            is_equal(local_part(member), before.to(member.device)) for member, before in rest
        )

    def numbers(self) -> dict[Key, Tensor]:
        """Return numbers by which it is told from any other state."""
        return copies_to_compare((STATE, str(index), value) for index, value in enumerate(self.values))

    def is_same(self, numbers: Mapping[Key, Tensor]) -> bool:
        """Return whether these are its numbers, to the last bit."""
        own = self.numbers()
        return own.keys() == numbers.keys() and all(torch.equal(own[key], value) for key, value in numbers.items())


def _is_varied(member: Tensor) -> bool:
    is_calculated = has_arithmetic(member) and (member.requires_grad or not is_packed(member))
    return isinstance(member, nn.Parameter) and is_calculated


def _shuffle(member: Tensor, before: Tensor, generator: torch.Generator) -> Tensor:
    if not _is_varied(member):
        return before
    order = torch.randperm(before.numel(), generator=generator).to(before.device)
    return before.flatten()[order].view_as(before)


def _nudge(value: Tensor, units: int, index: int) -> Tensor:
    if not has_arithmetic(value) or is_packed(value):
        return value
    generator = torch.Generator().manual_seed(units * _MEMBERS + index)
    signs = torch.randint(2, value.shape, generator=generator).mul_(2).sub_(1).to(value.device, value.dtype)
    return value * (1 + signs * units * torch.finfo(value.dtype).eps)


def _copy_state(state: Any, place: torch.device) -> Any:
    """Return a copy of an optimizer's state, with its tensors in ``place``; those on the host, such as a count of
    steps, stay there.
    """
    if isinstance(state, Tensor):
        return state.detach().to(HOST if state.device == HOST else place, copy=True)
    if isinstance(state, dict):
        return {key: _copy_state(value, place) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copy_state(value, place) for value in state)
    return deepcopy(state)
