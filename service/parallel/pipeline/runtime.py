"""Interprets any schedule: forwards, backwards and transfers in its order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from service.parallel.boundary import StepBoundary
from service.parallel.collectives import DisagreementError, agree
from service.parallel.fsdp import absorb_gradients, await_gradients, reduce_gradients, synchronize_gradients
from service.parallel.mesh import Mesh
from service.parallel.pipeline.tags import Direction, Message, TensorKind
from service.parallel.pipeline.transport import Channels, PendingReceive, Transport, connect
from service.parallel.tensor.linear import WeightGradients, splitting_backward
from service.schedules.schedule import BACKWARDS, Instruction, Op, Schedule, ScheduleError
from service.schedules.verify import verify

Objective = Callable[[Tensor, Tensor], Tensor]
Place = tuple[int, int]


class Observer(Protocol):
    """Observes this rank's work in time: around a whole run, and around each computation.

    A computation begins when its device has all its inputs, or will have them on its own stream.
    """

    def run(self, schedule: Schedule) -> AbstractContextManager[None]:
        """Hear of a whole run."""

    def computing(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Hear of a computation."""


class Unobserved:
    def run(self, schedule: Schedule) -> AbstractContextManager[None]:
        return nullcontext()

    def computing(self, instruction: Instruction) -> AbstractContextManager[None]:
        return nullcontext()


class InstructionError(RuntimeError):
    """An instruction failed on this rank; the cause is chained."""

    def __init__(self, rank: int, index: int, total: int, instruction: Instruction, cause: Exception) -> None:
        super().__init__(f"rank {rank}: instruction {index} of {total} ({instruction}) failed: {cause}")
        self.rank, self.index, self.instruction = rank, index, instruction


@dataclass(frozen=True)
class Work:
    """Holds the work of a step. Every rank names the same ``objective`` and ``key``.

    ``inputs`` (needed on the first stage) and ``targets`` (on the last) have a tensor per micro-batch.
    ``objective(output, target)`` is a scalar where the schedule trains, else any tensor. Each micro-batch's value is
    multiplied by its weight (1 / micro-batches when absent) before the backward, so that the gradients are those of the
    weighted sum. ``key`` stands for the shapes that stages exchange: change it when they change.
    """

    objective: Objective
    inputs: Sequence[Tensor] | None = None
    targets: Sequence[Tensor] | None = None
    weights: Sequence[float | Tensor] | None = None
    key: Hashable = ()

    def __post_init__(self) -> None:
        if not callable(self.objective):
            raise TypeError(f"objective={self.objective!r}: a pipeline needs a function objective(output, target)")


@dataclass
class _RunState:
    """Holds the state of one run."""

    schedule: Schedule
    work: Work
    split: frozenset[int]
    remaining: Counter[int]
    pending: dict[tuple[Place, Direction], PendingReceive] = field(default_factory=dict)
    buffers: dict[tuple[Place, Direction], Tensor] = field(default_factory=dict)
    handed: dict[tuple[Place, Direction], Tensor] = field(default_factory=dict)
    stage_inputs: dict[Place, Tensor] = field(default_factory=dict)
    roots: dict[Place, Tensor | GradientEdge] = field(default_factory=dict)
    outgoing: dict[tuple[Place, Direction], Tensor] = field(default_factory=dict)
    weights: dict[Place, WeightGradients] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


class PipelineRuntime:
    """Runs schedules over this rank's ``stages`` (modules by stage number).

    ``split_backwards`` counts the backwards of layers that the last training run split into inputs and weights. A
    layer that can't be split, such as one in a compiled block, computes both in the schedule's first half. Stages are
    called across ``boundary``, whose steps the caller begins.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mesh: Mesh,
        *,
        device: torch.device,
        owners: tuple[int, ...] | None = None,
        channels: Channels | None = None,
        observer: Observer | None = None,
        boundary: StepBoundary | None = None,
    ) -> None:
        self.stages, self.mesh, self.device = stages, mesh, device
        self.observer = observer or Unobserved()
        self.boundary = boundary or StepBoundary({})
        self.owners = tuple(range(mesh.pp.size)) if owners is None else owners
        self.transport = Transport(mesh.pp.rank, self.owners, channels or connect(mesh, self.owners), device)
        self.split_backwards = 0
        self._kinds: dict[Hashable, TensorKind] = {}
        self._verified: dict[int, tuple[Schedule, str]] = {}
        self._handlers: dict[Op, Callable[[_RunState, Instruction], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.REDUCE: self._reduce,
            Op.SEND_ACTIVATION: self._send,
            Op.SEND_GRADIENT: self._send,
            Op.RECV_ACTIVATION: self._receive,
            Op.RECV_GRADIENT: self._receive,
        }

    def run(self, schedule: Schedule, work: Work) -> tuple[Tensor, ...]:
        """Run a schedule to its end: return the objective's values per micro-batch, unweighted, on the rank of the
        last stage.

        Elsewhere the result is empty. Gradients are added to the parameters of this rank's stages. First the schedule
        is verified, and that all ranks run the same one; otherwise all raise :class:`DisagreementError` or
        ``ValueError``. An instruction that fails raises :class:`InstructionError`; the group is then unusable.
        """
        self._agree(schedule, work)
        instructions = schedule.ranks[self.mesh.pp.rank]
        split = frozenset(each.stage for each in instructions if each.op is Op.BACKWARD_WEIGHT)
        step = _RunState(schedule, work, split, Counter(each.stage for each in instructions if each.op in BACKWARDS))
        if schedule.trains:
            self.split_backwards = 0
        self.transport.begin((schedule.trains, work.key), schedule.micro_batches)
        with torch.set_grad_enabled(schedule.trains), self.observer.run(schedule):
            for index, instruction in enumerate(instructions):
                try:
                    self._handlers[instruction.op](step, instruction)
                except Exception as error:
                    raise InstructionError(self.mesh.rank, index, len(instructions), instruction, error) from error
        for stage in split:
            await_gradients(self.stages[stage])
        self.transport.finish()
        return tuple(step.values[each] for each in sorted(step.values))

    def _agree(self, schedule: Schedule, work: Work) -> None:
        """Raise on every rank if one refuses the run or runs it differently: the others would wait for it."""
        refused: Exception | None = None
        try:
            self._check(schedule, work)
        except (ValueError, ScheduleError) as error:
            refused = error
        try:
            agree(
                {
                    "whether it can be run": refused or "yes",
                    "the number of micro-batches": schedule.micro_batches,
                    "the stages' owners": schedule.owners,
                    "what is run": "training" if schedule.trains else "evaluation",
                    "the schedule": f"{schedule.name} {self._verified.get(id(schedule), (schedule, ''))[1]}".strip(),
                    "the key of the shapes": work.key,
                }
            )
        except DisagreementError:
            if refused is None:
                raise
        if refused is not None:
            raise refused
        if work.inputs and self._sends(schedule):
            self._kinds.setdefault(self._shapes_of(schedule, work), TensorKind.of(work.inputs[0]))

    def _check(self, schedule: Schedule, work: Work) -> None:
        if schedule.owners != self.owners:
            raise ValueError(f"the schedule gives stages to ranks {schedule.owners}; this pipeline has {self.owners}")
        needed = {"inputs": 0 in self.stages, "targets": schedule.stages - 1 in self.stages}
        for name, tensors in (("inputs", work.inputs), ("targets", work.targets), ("weights", work.weights)):
            wanted = schedule.micro_batches if needed.get(name) or tensors is not None else 0
            if len(tensors or ()) != wanted:
                raise ValueError(f"{len(tensors or ())} {name} for {wanted} micro-batches")
        if work.inputs and self._sends(schedule):
            self._check_kinds(schedule, work.inputs, work)
        # By identity: to compare or hash thousands of instructions would cost more than some steps.
        if id(schedule) not in self._verified:
            verify(schedule)
            digest = hashlib.blake2b(repr(schedule.ranks).encode(), digest_size=4).hexdigest()
            self._verified[id(schedule)] = schedule, digest

    def _check_kinds(self, schedule: Schedule, inputs: Sequence[Tensor], work: Work) -> None:
        """Raise ``ValueError`` unless inputs have the kind for which other stages posted receives."""
        known = self._kinds.get(self._shapes_of(schedule, work), TensorKind.of(inputs[0]))
        for index, each in enumerate(inputs):
            if TensorKind.of(each) != known:
                raise ValueError(
                    f"inputs[{index}] is {TensorKind.of(each)}, and others under the key {work.key!r} are {known}: "
                    "micro-batches of a run have one shape, and other shapes another key"
                )

    def _sends(self, schedule: Schedule) -> bool:
        return len(self.stages) < schedule.stages

    @staticmethod
    def _shapes_of(schedule: Schedule, work: Work) -> Hashable:
        return schedule.trains, work.key, schedule.micro_batches

    def _receive(self, step: _RunState, instruction: Instruction) -> None:
        message = _message(instruction)
        step.pending[_place(instruction), message.kind] = self.transport.receive(message)

    def _send(self, step: _RunState, instruction: Instruction) -> None:
        message = _message(instruction)
        self.transport.send(message, step.outgoing.pop((_place(instruction), message.kind)))

    def _take(self, step: _RunState, place: Place, kind: Direction) -> Tensor:
        """Take the input of a computation: from a stage on this rank, or from a pooled buffer."""
        if (place, kind) in step.handed:
            return step.handed.pop((place, kind))
        buffer = self.transport.wait(step.pending.pop((place, kind)))
        step.buffers[place, kind] = buffer
        return buffer

    def _give(self, step: _RunState, source: Place, target: Place, kind: Direction, tensor: Tensor) -> None:
        """Pass a result on: at once to a stage on this rank, else to the schedule's next send."""
        boundary = min(source[0], target[0])
        if step.schedule.is_local(boundary):
            step.handed[target, kind] = tensor
        else:
            step.outgoing[source, kind] = tensor

    def _release(self, step: _RunState, place: Place) -> None:
        for kind in Direction:
            if (buffer := step.buffers.pop((place, kind), None)) is not None:
                self.transport.release(buffer)

    def _splitting_backward(self, step: _RunState, place: Place) -> AbstractContextManager[None]:
        """Split a stage's backward within this context, if it should be split; both passes keep what its weight
        gradients need.
        """
        if place[0] not in step.split:
            return nullcontext()
        return splitting_backward(step.weights.setdefault(place, WeightGradients()))

    def _forward(self, step: _RunState, instruction: Instruction) -> None:
        place, trains = _place(instruction), step.schedule.trains
        stage, each = place
        x = self._input(step, place)
        with self.observer.computing(instruction), self._splitting_backward(step, place):
            output: Tensor = self.boundary.boundary_call(self.stages[stage], x)
            if stage == step.schedule.stages - 1:
                output = self._evaluate(step, each, output)
        if stage < step.schedule.stages - 1:
            passed = output.detach() if trains else _not_aliasing(output, x)
            self._give(step, place, (stage + 1, each), Direction.ACTIVATION, passed)
        if trains:
            # Of an output that is passed on, only its place in the graph is kept: once sent, its memory is free.
            is_loss = stage == step.schedule.stages - 1
            step.stage_inputs[place], step.roots[place] = x, output if is_loss else get_gradient_edge(output)
        else:
            self._release(step, place)

    def _evaluate(self, step: _RunState, micro_batch: int, output: Tensor) -> Tensor:
        """Return the objective's value, noted for the caller; weighted if it is the root of a backward."""
        work, trains = step.work, step.schedule.trains
        assert work.targets is not None
        value = work.objective(output, work.targets[micro_batch])
        # Copied: without a backward the value may be a view of memory that the pool hands out again.
        step.values[micro_batch] = value.detach() if trains else value.detach().clone()
        if not trains:
            return value
        return value * (1 / step.schedule.micro_batches if work.weights is None else work.weights[micro_batch])

    def _input(self, step: _RunState, place: Place) -> Tensor:
        if place[0] == 0:
            assert step.work.inputs is not None
            return step.work.inputs[place[1]]
        x = self._take(step, place, Direction.ACTIVATION).detach()
        return x.requires_grad_(step.schedule.trains and x.is_floating_point())

    def _backward(self, step: _RunState, instruction: Instruction) -> None:
        """Compute the gradients of the input and, unless they are due later, of the weights."""
        place = _place(instruction)
        stage, each = place
        is_loss, is_split = stage == step.schedule.stages - 1, stage in step.split
        root, x = step.roots.pop(place), step.stage_inputs.pop(place)
        step.remaining[stage] -= 1
        synchronize_gradients(self.stages[stage], step.remaining[stage] == 0 and not is_split)
        gradient = None if is_loss else self._take(step, place, Direction.GRADIENT)
        with self.observer.computing(instruction), self._splitting_backward(step, place):
            torch.autograd.backward(root, gradient)
        if stage > 0:
            assert x.grad is not None
            received = step.buffers.get((place, Direction.GRADIENT), x)
            self._give(step, place, (stage - 1, each), Direction.GRADIENT, _not_aliasing(x.grad, received))
        if not is_split:
            self._release(step, place)

    def _backward_weight(self, step: _RunState, instruction: Instruction) -> None:
        place = _place(instruction)
        with self.observer.computing(instruction):
            self.split_backwards += step.weights.pop(place).flush()
            absorb_gradients(self.stages[instruction.stage])
        self._release(step, place)

    def _reduce(self, step: _RunState, instruction: Instruction) -> None:
        reduce_gradients(self.stages[instruction.stage])


def _place(instruction: Instruction) -> Place:
    return instruction.stage, instruction.micro_batch


def _message(instruction: Instruction) -> Message:
    upwards = instruction.op in (Op.SEND_ACTIVATION, Op.RECV_GRADIENT)
    kind = Direction.GRADIENT if instruction.op in (Op.SEND_GRADIENT, Op.RECV_GRADIENT) else Direction.ACTIVATION
    return Message(instruction.stage if upwards else instruction.stage - 1, instruction.micro_batch, kind)


def _not_aliasing(result: Tensor, received: Tensor) -> Tensor:
    """Return the result with memory of its own: the pool reuses the buffer while the result is on its way."""
    shared = result.untyped_storage().data_ptr() == received.untyped_storage().data_ptr()
    return result.detach().clone() if shared else result.detach()
