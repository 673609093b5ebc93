"""How many states of the uncompiled run later runs begin from."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from programs import sound

from service.compilation.program import Parts
from service.compilation.run import recorded_run
from service.compilation.run.built_program import build
from service.compilation.run.recorded_run import record_run, states_to_keep


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
