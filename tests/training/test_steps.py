"""The arithmetic around a step: gradient norm, totals over ranks, the cut of the test split, micro-batches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.models.data import Split
from service.objectives.cross_entropy import ClassCrossEntropy
from service.parallel.boundary import StepBoundary
from service.training.engine import AccumulationEngine, SharesOfSamples, chunks
from service.training.gradients import NonFiniteError, clip_, squared_norm
from service.training.history import History
from service.training.journal import PEAK_FLOPS
from service.training.loop import batches
from service.training.step_totals import RankShare, StepReduction

CPU = torch.device("cpu")


def gradients(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((7, 3), (5,), ())]


def test_norm_and_clipping_are_those_of_torch() -> None:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients()]
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    own = gradients()
    norm = squared_norm(own, 1, CPU).sqrt()
    clip_(own, norm, 0.5)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for gradient, parameter in zip(own, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_gradients_of_complex_parameters_are_clipped_with_the_others() -> None:
    own = [torch.complex(torch.tensor([3.0]), torch.tensor([4.0])), torch.zeros(2)]
    clip_(own, squared_norm(own, 1, CPU).sqrt(), 1.0)
    torch.testing.assert_close(own, [torch.complex(torch.tensor([0.6]), torch.tensor([0.8])), torch.zeros(2)])


def test_small_gradients_are_left_alone() -> None:
    own = gradients()
    clip_(own, torch.tensor(1.0), 2.0)
    assert all(torch.equal(left, right) for left, right in zip(own, gradients(), strict=True))


def test_a_tensor_that_all_ranks_hold_counts_once() -> None:
    assert 4 * squared_norm(gradients(), 4, CPU).item() == pytest.approx(squared_norm(gradients(), 1, CPU).item())
    assert squared_norm([], 4, CPU).item() == 0


def reduction(loss: float, squared: float, *, stop: bool = False) -> StepReduction:
    share = RankShare(torch.tensor(loss), torch.tensor(squared, dtype=torch.float64), stop=stop, memory_gib=2.5)
    return StepReduction(share)


def test_totals_of_one_rank_are_its_own() -> None:
    totals = reduction(0.5, 9.0, stop=True).read(step=1)
    assert (totals.loss, totals.grad_norm, totals.stop, totals.memory_gib) == (0.5, 3.0, True, 2.5)
    assert reduction(0.5, 9.0).read(step=1).stop is False


@pytest.mark.parametrize(
    ("loss", "squared", "message"),
    [
        (math.nan, 1.0, "the loss is not finite on rank 0 at step 7"),
        (math.inf, math.nan, "the loss is not finite on rank 0 at step 7"),
        (1.0, math.inf, "the gradient norm is not finite on rank 0 at step 7"),
    ],
)
def test_numbers_that_are_not_finite_are_errors(loss: float, squared: float, message: str) -> None:
    with pytest.raises(NonFiniteError, match=message):
        reduction(loss, squared).read(step=7)


@given(samples=st.integers(1, 200), share=st.integers(1, 20), ranks=st.integers(1, 6))
def test_every_test_sample_is_counted_once_and_ranks_stay_in_step(samples: int, share: int, ranks: int) -> None:
    per_rank = [batches(samples, share * ranks, rank, ranks) for rank in range(ranks)]
    assert len({len(own) for own in per_rank}) == 1
    assert all(len(rows) == share for own in per_rank for rows, _ in own)
    counted = [row for own in per_rank for rows, valid in own for row in rows[:valid].tolist()]
    assert sorted(counted) == list(range(samples))


@given(size=st.integers(1, 10), count=st.integers(1, 10))
def test_micro_batches_are_equal_and_in_order(size: int, count: int) -> None:
    rows = torch.arange(size * count)
    parts = list(chunks(Split(rows, rows), count))
    assert [len(part) for part in parts] == [size] * count
    assert torch.equal(torch.cat([part.inputs for part in parts]), rows)


def test_micro_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="share of 7 samples does not divide into 2 micro-batches"):
        list(chunks(Split(torch.arange(7), torch.arange(7)), 2))


@pytest.mark.parametrize("valid", [0, 3, 8, 11, 12])
def test_evaluation_runs_in_micro_batches_and_counts_what_is_no_padding(valid: int) -> None:
    model, objective = torch.nn.Linear(5, 3), ClassCrossEntropy()
    sizes: list[int] = []
    model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    batch = Split(torch.randn(12, 5), torch.arange(12) % 3)
    found = AccumulationEngine(model, objective, 3, SharesOfSamples(12), StepBoundary({"model": model})).evaluate(
        batch, valid
    )
    assert sizes == [4, 4, 4]
    expected = objective.totals(model(batch.inputs[:valid]), batch.targets[:valid])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None)],
)
def test_peaks_are_known_by_name_or_not_claimed(name: str, peak: float | None) -> None:
    assert PEAK_FLOPS.get(name) == peak


def test_history_forgets_the_steps_that_will_run_again(tmp_path: Path) -> None:
    path = tmp_path / "artifacts" / "metrics.parquet"
    history = History(path, 0)
    for step in (1, 2, 3):
        history.add(step, {"loss": float(step)})
    history.add(3, {"eval_loss": 0.5})
    history.write()
    taken_up = History(path, 2)
    taken_up.add(3, {"loss": 9.0})
    assert [(row["step"], row["loss"]) for row in taken_up.rows] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert History(path, 3).rows[-1]["eval_loss"] == 0.5
    assert History(path, 0).rows == []
