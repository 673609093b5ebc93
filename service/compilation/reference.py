"""The uncompiled runs that judge a compiled one: eager, eager again for its noise, and float64 for the truth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.compilation.execution import Key, Record, Subject, build, record, state_of
from service.compilation.internals.memory import Peak, peak, reset_peak
from service.compilation.internals.text import first_line
from service.compilation.parity import Oracle, comparable, judged_scale, scale_of
from service.compilation.program import Phase, Program


@dataclass(frozen=True)
class Run:
    """Iterations of one subject, with its trainable parameters and buffers before and after them.

    ``random``: random numbers were drawn. ``unsharded``: parameters that FSDP did not put back among the ranks.
    """

    records: tuple[Record, ...]
    before: dict[Key, Tensor]
    after: dict[Key, Tensor]
    random: bool
    unsharded: frozenset[str] = frozenset()

    def tensors(self, iteration: int) -> dict[Key, Tensor]:
        """What the iteration gave; the updated parameters and buffers come as one more iteration at the end."""
        return self.records[iteration].tensors if iteration < len(self.records) else self.after

    @property
    def missing(self) -> frozenset[str]:
        """Trainable parameters that got no gradient in any iteration."""
        sets = [record.missing for record in self.records]
        return frozenset.intersection(*sets) if sets else frozenset()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the trainable parameters."""
        return tuple(name for kind, name in self.before if kind == "parameter")

    @property
    def moved(self) -> frozenset[str]:
        """Trainable parameters that the updates changed."""
        keys = [("parameter", name) for name in self.parameters]
        return frozenset(
            name for kind, name in keys if not torch.equal(self.before[kind, name], self.after[kind, name])
        )


@dataclass(frozen=True)
class Reference:
    """``truth`` is ``None`` where float64 does not compute the same thing (``truth_note`` says why).

    ``overwritten``: inputs that the program updates in place. ``repeatable``: two eager runs agree bit by bit.
    """

    eager: Run
    again: Run
    truth: Run | None
    truth_note: str
    overwritten: tuple[str, ...]
    peak: Peak | None

    @property
    def repeatable(self) -> bool:
        return all(
            torch.equal(value, self.again.tensors(index)[key])
            for index in range(len(self.eager.records) + 1)
            for key, value in self.eager.tensors(index).items()
        )

    def oracles(self, iteration: int) -> dict[Key, Oracle]:
        """How to judge each tensor of an iteration."""
        eager, again = self.eager.tensors(iteration), self.again.tensors(iteration)
        truth = self.truth.tensors(iteration) if self.truth else {}
        scales = {key: scale_of(value) for key, value in eager.items()}
        largest = {kind: max(scale for (k, _), scale in scales.items() if k == kind) for kind, _ in scales}
        return {
            key: Oracle(value, truth.get(key), judged_scale(scales[key], largest[key[0]]), _noise(value, again[key]))
            for key, value in eager.items()
        }


def refer(program: Program, phase: Phase, iterations: int) -> Reference:
    """Run ``program`` uncompiled, three times over; raises what the program raises."""
    reset_peak(program.device)
    eager = run(build(program, phase), iterations)
    memory = peak(program.device)
    again = run(build(program, phase), iterations)
    truth, note = _truth(program, phase, iterations, eager)
    return Reference(eager, again, truth, note, _overwritten(eager), memory)


def run(subject: Subject, iterations: int) -> Run:
    """Run and record ``iterations``, each with a seed of its own."""
    before = state_of(subject)
    records, draws = [], []
    for iteration in range(iterations):
        seed(iteration)
        fresh = _generator(subject.program.device)
        records.append(record(subject))
        draws.append(not torch.equal(fresh, _generator(subject.program.device)))
    return Run(tuple(records), before, state_of(subject), any(draws))


def seed(iteration: int) -> None:
    """Seed the iteration, alike in all runs."""
    torch.manual_seed(iteration)


def _truth(program: Program, phase: Phase, iterations: int, eager: Run) -> tuple[Run | None, str]:
    """The float64 run, or why there is none that eager could be measured by."""
    try:
        truth = run(build(program, phase, dtype=torch.float64), iterations)
    except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:
        return None, f"the model does not run in float64 ({type(error).__name__}: {first_line(str(error))})"
    for index in range(iterations):
        for key, value in eager.tensors(index).items():
            exact = truth.tensors(index).get(key)
            if key[0] == "output" and value.is_floating_point() and (exact is None or not comparable(value, exact)):
                return None, f"{key[1]} of iteration {index} is another computation in float64 (random draws differ?)"
    return truth, ""


def _overwritten(eager: Run) -> tuple[str, ...]:
    return tuple(sorted(frozenset[str]().union(*(each.overwritten for each in eager.records))))


def _noise(value: Tensor, again: Tensor) -> float:
    """Largest distance of two eager runs."""
    return float((value.double() - again.double()).nan_to_num().abs().max()) if value.numel() else 0.0


def _generator(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
