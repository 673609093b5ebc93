"""Ways of writing a program that are right raise no alarm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ladder_runs import Ascend
from programs import sound
from torch import nn

from service.compilation.rungs import RUNGS

pytestmark = pytest.mark.usefixtures("_imports_set_aside")
BELOW_CODE = [RUNGS["eager"], RUNGS["aot_eager"]]


@pytest.mark.parametrize(("modules", "graphs"), [(sound.bare, 1), (sound.frozen_backbone, 2)])
def test_modules_of_torch_itself_are_compiled(
    ascend: Ascend, modules: Callable[[], dict[str, nn.Module]], graphs: int
) -> None:
    results = ascend(sound.SoundProgram(modules), BELOW_CODE, phases=("train", "inference"))
    assert [(result.verdict, result.findings) for result in results] == [("pass", ())] * 4
    assert [result.observation.evidence.graphs for result in results if result.observation] == [graphs] * 4
