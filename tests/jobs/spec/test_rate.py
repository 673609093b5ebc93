"""Learning-rate schedules, and the condition at which a training ends early: both follow from their arguments alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch.optim import lr_scheduler

from service.jobs.plugins import Evaluation, ScheduleConfig
from service.jobs.spec.rate import ScheduleSpec, StopSpec

runs = st.tuples(st.integers(1, 500), st.integers(0, 500), st.floats(0, 1))
_specs: TypeAdapter[ScheduleConfig] = TypeAdapter(ScheduleSpec)
STEPS = 31


def schedule(**fields: Any) -> ScheduleConfig:
    return _specs.validate_python(fields)


def evaluated(losses: Sequence[float]) -> list[Evaluation]:
    return [Evaluation(step, {"eval_loss": loss}) for step, loss in enumerate(losses, 1)]


@given(run=runs, decay=st.sampled_from(["constant", "cosine", "linear"]))
def test_rate_rises_to_the_peak_and_never_rises_again(run: tuple[int, int, float], decay: str) -> None:
    steps, warmup, floor = run
    chosen = schedule(warmup=warmup, decay=decay, floor=floor)
    rates = [chosen.share(step, steps) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates[: warmup or 1])
    assert all(left < right for left, right in pairwise(rates[:warmup]))
    assert all(left >= right for left, right in pairwise(rates[warmup:]))
    assert all(rate >= floor * (1 - 1e-12) for rate in rates[warmup:])


def test_cosine_ends_at_the_floor_and_is_halfway_in_the_middle() -> None:
    chosen = schedule(warmup=10, floor=0.2)  # a cosine, where nothing is said
    assert [chosen.share(step, 111) for step in (0, 9, 10, 60, 110)] == pytest.approx([0.1, 1, 1, 0.6, 0.2])
    assert [chosen.share(step, 11) for step in (9, 10)] == pytest.approx([1, 0.2])


def test_wsd_is_stable_until_its_last_steps() -> None:
    chosen = schedule(decay="wsd", warmup=2, last=4, floor=0)
    assert [chosen.share(step, 10) for step in range(10)] == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]


SGD = torch.optim.SGD([torch.zeros(1)], lr=1.0)
OF_TORCH = {
    "constant": (schedule(decay="constant"), lambda of: lr_scheduler.ConstantLR(of, 1.0)),
    "cosine": (
        schedule(decay="cosine", floor=0.1),
        lambda of: lr_scheduler.CosineAnnealingLR(of, STEPS - 1, eta_min=0.1),
    ),
    "linear": (schedule(decay="linear", floor=0.1), lambda of: lr_scheduler.LinearLR(of, 1.0, 0.1, STEPS - 1)),
    "step": (schedule(decay="step", every=7, gamma=0.5), lambda of: lr_scheduler.StepLR(of, 7, 0.5)),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_schedule_is_torchs_own(name: str) -> None:
    chosen, of_torch = OF_TORCH[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler, expected = of_torch(optimizer), []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [chosen.share(step, STEPS) for step in range(STEPS)] == pytest.approx(expected, rel=1e-12)


@given(
    losses=st.lists(st.sampled_from([1.0, 0.9, 0.89995, 0.5, 0.2]), max_size=30),
    patience=st.integers(0, 4),
    mode=st.sampled_from(["min", "max"]),
)
def test_plateau_is_torchs_own(losses: list[float], patience: int, mode: Any) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    of_torch = lr_scheduler.ReduceLROnPlateau(optimizer, mode, 0.5, patience, threshold=1e-3, min_lr=0.1)
    chosen = schedule(decay="plateau", mode=mode, gamma=0.5, patience=patience, threshold=1e-3, floor=0.1)
    for count, loss in enumerate(losses, 1):
        of_torch.step(loss)
        assert chosen.share(count, 100, evaluated(losses[:count])) == pytest.approx(optimizer.param_groups[0]["lr"])


def test_a_constant_rate_that_was_written_out_with_a_floor_is_read() -> None:
    assert schedule(decay="constant", floor=0.1, warmup=3) == schedule(decay="constant", warmup=3)
    with pytest.raises(ValidationError, match="floor"):
        schedule(decay="step", every=2, floor=0.1)


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([], False),
        ([3, 2, 1, 1.1], False),
        ([3, 2, 1, 1.1, 0.99], True),
        ([1, 1, 1], True),
        ([1, 0.5, 0.7, 0.1], False),
    ],
)
def test_training_ends_once_evaluations_are_no_better_for_so_long(losses: list[float], ends: bool) -> None:
    stop = StopSpec.model_validate({"when": {"eval_loss": {"patience": 2, "delta": 0.05}}})
    found = stop.reason(evaluated(losses))
    assert (found is not None) == ends
    if ends:
        assert found == "eval_loss is no better than 1 after 2 more evaluations"


def test_the_greater_may_be_the_better() -> None:
    stop = StopSpec.model_validate({"when": {"eval_accuracy": {"patience": 1, "mode": "max"}}})
    rising = [Evaluation(step, {"eval_accuracy": step / 10}) for step in range(5)]
    assert stop.reason(rising) is None
    assert stop.reason([*rising, Evaluation(6, {"eval_accuracy": 0.3})]) is not None
