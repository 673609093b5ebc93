"""How many states of the uncompiled run later runs begin from."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from programs import sound

from service.compilation.program import Parts
from service.compilation.run import recorded_run
from service.compilation.run.built_program import build
from service.compilation.run.recorded_run import RecordedRun, record_run, states_to_keep


class Plain(sound.SoundProgram):
    """Its optimizer holds nothing."""

    lr = 0.1

    def build(self, dtype: torch.dtype) -> Parts:
        parts = super().build(dtype)
        held = [each for module in parts.modules.values() for each in module.parameters()]
        return Parts(parts.modules, parts.compiled, (torch.optim.SGD(held, self.lr),), dtype)


class Frozen(Plain):
    """Its optimizer moves nothing."""

    lr = 0.0


class WithMoments(sound.SoundProgram):
    """Its optimizer holds two moments of each parameter."""

    def build(self, dtype: torch.dtype) -> Parts:
        parts = super().build(dtype)
        held = [each for module in parts.modules.values() for each in module.parameters()]
        return Parts(parts.modules, parts.compiled, (torch.optim.Adam(held),), dtype)


@pytest.mark.parametrize(("program", "states"), [(sound.SoundProgram, 8), (WithMoments, 2)])
def test_the_room_is_shared_by_what_optimizers_really_hold(
    program: type[sound.SoundProgram], states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(program(sound.bare), "train")
    size = sum(each.nbytes for each in built.members)
    monkeypatch.setattr(recorded_run, "free_bytes", lambda place: 4 * 18 * size)  # of which states may take a quarter
    run = record_run(built, 8, keeping=partial(states_to_keep, iterations=8, on_any=lambda flag: flag))
    assert len(run.starts) == states


@pytest.mark.parametrize(
    ("program", "begins_anew"),
    [(Plain(sound.bare), True), (Plain(sound.normalised), False), (WithMoments(sound.bare), False)],
    ids=["parameters alone", "running statistics", "moments"],
)
def test_states_that_every_process_can_make_are_told_from_those_that_it_cannot(
    program: sound.SoundProgram, begins_anew: bool
) -> None:
    run = _run_from_varied_states(program)
    assert run.begins_anew is begins_anew
    assert run.moved
    first, second = (run.records[index].tensors["loss", "loss"] for index in (0, 1))
    assert not torch.equal(first, second), "the batch is the same, so the state is not"


def test_a_parameter_that_no_update_moves_is_seen_beside_multiples_of_it() -> None:
    run = _run_from_varied_states(Frozen(sound.bare))
    assert run.begins_anew
    assert not run.moved


def _run_from_varied_states(program: sound.SoundProgram) -> RecordedRun:
    keeping = partial(states_to_keep, iterations=8, on_any=lambda flag: flag, is_varied=True)
    return record_run(build(program, "train"), 8, keeping=keeping)
