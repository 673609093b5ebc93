"""What a GPU may compute in TF32 is no defect of a compiler, and hides none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ladder_runs import Ascend, quick_plan
from lanes import first_fast
from programs import clean
from programs.parts import CLASSES, FEATURES, Perceptron, program
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils._python_dispatch import _get_current_dispatch_mode

from service.compilation.instruments import tf32
from service.compilation.instruments.tf32 import InTf32
from service.compilation.phase_observer import PhaseObserver
from service.compilation.program import Parts, Step
from service.compilation.program.model import ModelProgram, SampleBatch
from service.compilation.run import baseline
from service.compilation.run.baseline import AwaitedBaseline, UncompiledRuns
from service.compilation.run.observation import RungCase
from service.compilation.run.oracles import Noise, Oracle
from service.compilation.rungs import LADDER, Rung
from service.parallel.boundary import StepBoundary


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 16, 3), nn.Conv1d(16, 16, 3)
        self.head = nn.Linear(16 * (FEATURES - 4), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x.unsqueeze(1)).tanh()).flatten(1))


def compiles_to(mode: Callable[[], Any]) -> Rung:
    """A rung whose code convolves as it does under ``mode``."""

    def compiler(graph: torch.fx.GraphModule, _inputs: Sequence[Tensor]) -> Any:
        def run(*values: Any) -> Any:
            with mode():
                return graph(*values)

        return make_boxed_func(run)

    return Rung("planted", aot_autograd(fw_compiler=compiler, bw_compiler=compiler))


class Coarse(InTf32):
    """Is off by eight times as much as TF32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = self._factors.get(func.name().partition(".")[0], ())
        args = tuple(
            each * (1 + 2**-8) if place in places and isinstance(each, Tensor) else each
            for place, each in enumerate(args)
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("allowed", "mode", "verdict"), first_fast(2, [
    (True, InTf32, "pass"), (True, Coarse, "fail_parity"), (False, InTf32, "fail_parity"),
]))  # fmt: skip
def test_convolutions_may_lose_what_tf32_loses_where_it_is_allowed_and_no_more(
    ascend: Ascend, monkeypatch: pytest.MonkeyPatch, allowed: bool, mode: type[InTf32], verdict: str
) -> None:
    factors = tf32._CONVOLUTIONS if allowed else {}
    monkeypatch.setattr(baseline, "factors_that_may_lose_bits", lambda _: factors)
    (result,) = ascend(program(Convolving), [compiles_to(lambda: mode(tf32._CONVOLUTIONS))])
    assert result.verdict == verdict, result.findings
    assert result.observation is not None
    assert any("TF32" in note for note in result.observation.notes) == allowed


class Cancelling(Convolving):
    """Leaves little of large factors, of which TF32 loses a good part."""

    def forward(self, x: Tensor) -> Tensor:
        large = self.first(x.unsqueeze(1) + 512)
        return self.head(self.second((large - large.mean((0, 2), keepdim=True)).tanh()).flatten(1))


def as_allowed() -> Any:
    """Convolve as a device does that takes TF32 wherever it may."""
    return InTf32(tf32._CONVOLUTIONS) if torch.backends.cudnn.allow_tf32 else nullcontext()


@pytest.mark.parametrize(("mode", "verdict"), [
    (as_allowed, "pass"), pytest.param(lambda: Coarse(tf32._CONVOLUTIONS), "fail_parity", marks=pytest.mark.slow),
])  # fmt: skip
def test_where_tf32_would_hide_errors_both_sides_run_without(
    ascend: Ascend, monkeypatch: pytest.MonkeyPatch, mode: Callable[[], Any], verdict: str
) -> None:
    def factors(_: torch.device) -> Any:
        return tf32._CONVOLUTIONS if torch.backends.cudnn.allow_tf32 else {}

    monkeypatch.setattr(baseline, "factors_that_may_lose_bits", factors)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    (result,) = ascend(program(Cancelling), [compiles_to(mode)])
    assert result.verdict == verdict, result.findings
    assert torch.backends.cudnn.allow_tf32
    assert result.observation is not None
    assert any(note.endswith("judged, and timed, in full float32") for note in result.observation.notes)


class Noting(ModelProgram):
    """Notes for each step whether it is compiled, and may be computed in TF32."""

    steps: ClassVar[list[tuple[bool, bool]]] = []

    def _train_step(self, parts: Parts, boundary: StepBoundary, original: SampleBatch) -> Step:
        compiled = any(module._compiled_call_impl is not None for module in parts.modules.values())
        self.steps.append((compiled, torch.backends.cudnn.allow_tf32))
        return super()._train_step(parts, boundary, original)


def test_a_rung_that_ran_before_tf32_was_seen_to_hide_errors_runs_again_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What only a later step computes in TF32 is not seen when each shape is visited: the rung begins at once."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    watched, plan = Noting(**vars(clean.PERCEPTRON)), quick_plan(clean.PERCEPTRON, 4)
    runs = UncompiledRuns(watched, "train", plan.iterations, bool, plan.tells)
    first = runs.begin()
    hidden = replace(runs.complete(first), hidden_by_tf32=0.5)
    watched.steps.clear()
    seen = PhaseObserver(watched, AwaitedBaseline(first, lambda: hidden)).observe(RungCase(LADDER[0], "train"), plan)
    compiled = [allowed for compiled, allowed in watched.steps if compiled]
    assert compiled[: 2 * plan.iterations] == [True] * 2 * plan.iterations
    assert compiled[-plan.iterations :] == [False] * plan.iterations
    assert seen.comparisons
    assert not seen.error


class Unwatched(nn.Linear):
    """Runs under no mode that sees its operators."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("planted: no mode here")
        return super().forward(x)


@pytest.mark.parametrize(("module", "waits"), [(Convolving, True), (Perceptron, False), (Unwatched, True)])
def test_a_rung_waits_for_the_baseline_of_a_program_that_may_be_computed_in_tf32_or_cannot_be_watched(
    module: type[nn.Module], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baseline, "factors_that_may_lose_bits", lambda _: tf32._CONVOLUTIONS)
    runs = UncompiledRuns(program(module), "train", 4, bool, lambda name: None)
    assert runs.visit().loses_bits == waits


def test_what_steps_leave_behind_is_not_asked_whether_tf32_hides_errors() -> None:
    count = Oracle(torch.tensor(3), None, 3.0, allowed=Noise(1.0, 1.0))
    for kind, moved in (("buffer", 0.0), ("output", math.inf)):
        judged: Any = SimpleNamespace(iterations=1, oracles=[{(kind, "positive"): count}])
        assert baseline._moved_by_tf32(judged) == moved


def test_nothing_is_run_again_where_no_factor_loses_bits() -> None:
    assert tf32.factors_that_may_lose_bits(torch.device("cpu")) == {}
    with InTf32(tf32._CONVOLUTIONS) as mode:
        nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
    assert not mode.rounded


@given(st.floats(width=32))
def test_a_rounded_number_is_the_nearest_of_eleven_bits(number: float) -> None:
    value = torch.tensor([[number]])
    found = tf32.tf32(value)
    assert found.shape == value.shape
    if value.isfinite().all() and abs(number) > 1e-37:
        assert abs(float(found) - number) <= abs(number) * 2**-11
        assert int(found.view(torch.int32)) % (1 << 13) == 0 or float(found) == number
    else:
        assert torch.equal(found.isfinite(), value.isfinite())
