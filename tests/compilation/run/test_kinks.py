"""A gradient on the other side of a kink is no fault where rounding decides it in eager too; any other is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ladder_runs import Ascend
from programs import sound
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from service.compilation.run import kinks
from service.compilation.run.oracles import Oracle
from service.compilation.run.parity import Comparison
from service.compilation.rungs import Rung

WIDE = 32


class Bent(nn.Module):
    """Has one number within rounding of the border of a relu, in the first iteration alone: ``shift`` is 0 there."""

    def __init__(self, bend: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.bend, self.shift, self.last = bend, nn.Parameter(torch.zeros(WIDE)), nn.Linear(WIDE, sound.CLASSES)
        self.register_buffer("edge", torch.ones(WIDE))
        at = 2 + torch.rand(16, WIDE)
        at[0, 0] = 1 + 2.0**-23
        self.register_buffer("at", at)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.bend(self.at + self.shift - self.edge)) + 0 * x.sum()
        return scores


def rung(code: Callable[[fx.GraphModule], Callable[..., Any]], part: str) -> Rung:
    def as_it_is(graph: fx.GraphModule, _inputs: Sequence[Tensor]) -> Any:
        return make_boxed_func(graph.forward)

    def changed(graph: fx.GraphModule, _inputs: Sequence[Tensor]) -> Any:
        return make_boxed_func(code(graph))

    compilers = {"fw_compiler": as_it_is, "bw_compiler": as_it_is, part: changed}
    return Rung("planted", aot_autograd(**compilers))


def rounds_up(graph: fx.GraphModule) -> Callable[..., Any]:
    """Let vectors be a unit or two in the last place larger, as the sums of another order are."""
    return lambda *values: graph(*(each * (1 + 2.0**-22) if each.ndim == 1 else each for each in values))


def wrong(times: range) -> Callable[[fx.GraphModule], Callable[..., Any]]:
    """Return what makes code whose results are off by as much as those of a kink, in some of its calls."""

    def code(graph: fx.GraphModule) -> Callable[..., Any]:
        calls = iter(range(1000))

        def run(*values: Any) -> Any:
            factor = 1.03 if next(calls) in times else 1.0
            return [each * factor if isinstance(each, Tensor) else each for each in graph(*values)]

        return run

    return code


def test_zeros_of_eager_excuse_nothing_where_iterations_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that stay zeros when numbers are moved, nor those that jump: no jump is a part of their size."""
    zero, key = torch.zeros(2), ("loss", "hinge")
    baseline: Any = SimpleNamespace(
        iterations=1, oracles=[{key: Oracle(zero, zero, 0.0)}] * 3, eager=SimpleNamespace(starts=[])
    )
    own: Any = SimpleNamespace(tensors=[{key: zero}, {key: zero}, {key: zero + 5}])
    nothing: Any = None
    for moved in (zero, zero + 1):
        monkeypatch.setattr(kinks, "record_uncompiled", lambda *_, moved=moved: SimpleNamespace(tensors=[{key: moved}]))
        most = kinks.jumps(nothing, "train", baseline)
        assert not kinks.are_kinks([Comparison(*key, 2, inf, 5.0)], own, baseline, most)


def test_what_a_wrong_gradient_leaves_behind_is_doubtful_with_it() -> None:
    found = [Comparison("gradient", "weight", 4, 9.0, 1.0), Comparison("buffer (whole)", "mean", 5, 9.0, 1.0)]
    assert kinks.doubtful(found, 6) == tuple(found)
    assert not kinks.doubtful([*found, Comparison("output", "y", 5, 9.0, 1.0)], 6)


def test_a_gradient_that_jumps_where_rounding_decides_passes_with_a_note(ascend: Ascend) -> None:
    (result,) = ascend(sound.SoundProgram(lambda: {"net": Bent()}), [rung(rounds_up, "fw_compiler")])
    assert (result.verdict, result.findings) == ("pass", ())
    assert result.observation is not None
    (told,) = [note for note in result.observation.notes if "kink" in note]
    assert told.startswith("rounding decides on which side of a kink, as of a relu, in eager too: ")
    assert "shift" in told


@pytest.mark.parametrize(
    ("bend", "times"),
    [(torch.tanh, range(1, 2)), pytest.param(torch.relu, range(1000), marks=pytest.mark.slow)],
)
def test_gradients_that_are_wrong_once_without_a_kink_or_always_are_a_fault(
    ascend: Ascend, bend: Callable[[Tensor], Tensor], times: range
) -> None:
    (result,) = ascend(sound.SoundProgram(lambda: {"net": Bent(bend)}), [rung(wrong(times), "bw_compiler")])
    assert result.verdict == "fail_parity"
