"""From specifications to boxes, rows and verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import first_fast
from nets import mlp, prepared
from safetensors.torch import save_file
from torch import nn
from verify_jobs import robustness

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.rank_group import RankGroup
from service.jobs.files import DataLayout
from service.jobs.spec.verify import BoxProperty
from service.models.data import Split
from service.verification.certify import certify
from service.verification.counterexamples import CounterexampleChecker
from service.verification.engine import NetworkEngine
from service.verification.properties import InstanceBatch, PropertyError, read
from service.verification.properties.base import below
from service.verification.properties.robustness import RobustSamples, margin_rows
from service.verification.verdict import Verdict

LIKE = torch.empty(0)


def box(**fields: Any) -> BoxProperty:
    return BoxProperty.model_validate({"box": {"lower": [-1.0, 0.0], "upper": [1.0, 0.5], **fields}})


def test_margins_leave_out_the_label_itself() -> None:
    rows = margin_rows(torch.tensor([1, 0]), 3, torch.float32)
    assert rows.tolist() == [[[-1, 1, 0], [0, 1, -1]], [[1, -1, 0], [1, 0, -1]]]


def test_robustness_asks_for_balls_around_test_samples() -> None:
    asked = read(robustness(count=7, eps=0.25), 64, 10)
    batch = asked.batch([2, 5], LIKE)
    assert asked.count == 7
    assert batch.rows.shape == (2, 9, 10)
    assert (batch.box.lower <= batch.witnesses - 0.25).all()
    assert (batch.box.upper >= batch.witnesses + 0.25).all()
    assert batch.box.lower.min() < 0, "the ball isn't clipped to the data's range"
    torch.testing.assert_close(batch.box.width, torch.full_like(batch.box.lower, 0.5))


def test_robustness_asks_about_the_test_samples_of_an_uploaded_file(tmp_path: Path) -> None:
    layout, file = DataLayout(tmp_path), "file_" + "0" * 64
    layout.file(file).parent.mkdir(parents=True)
    arrays = {"inputs": torch.arange(40, dtype=torch.uint8).view(10, 2, 2), "targets": torch.arange(10) % 3}
    save_file(arrays, layout.file(file))
    spec = robustness(count=2, source="file", format="arrays", file=file, shape=[2, 2], classes=3)
    batch = read(spec, 4, 3, layout).batch([1], LIKE)
    assert batch.witnesses.tolist() == (torch.arange(36.0, 40.0) / 255).view(1, 4).tolist()
    with pytest.raises(ValueError, match="there is no uploaded file"):
        read(spec, 4, 3)


@pytest.mark.parametrize(
    ("spec", "features", "classes", "message"),
    [
        (robustness(count=10_000), 64, 10, "property.robustness.count=10000, but the test split has 359 samples"),
        (robustness(), 32, 10, "property.robustness.data has 64 features, the model takes 32"),
        (robustness(), 64, 4, "property.robustness.data has class 9, the model gives 4 outputs"),
        (box(), 3, 2, "property.box.lower has 2 entries, the model takes 3"),
        (
            box(output=[{"coefficients": [1.0, 2.0]}, {"coefficients": [1.0]}]),
            2,
            2,
            "property.box.output.1.coefficients has 1 entries, the model gives 2 outputs",
        ),
    ],
)
def test_a_property_that_does_not_fit_is_refused(spec: Any, features: int, classes: int, message: str) -> None:
    with pytest.raises(PropertyError) as refused:
        read(spec, features, classes)
    assert message in str(refused.value)


def test_one_class_cannot_be_mistaken_for_another() -> None:
    samples = Split(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(PropertyError, match=r"property\.robustness: the model gives 1 output, expected 2 classes"):
        RobustSamples(samples, 1, eps=0.1)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e3))
def test_float32_boxes_are_rounded_outwards(lower: float, width: float) -> None:
    exact = torch.tensor([lower], dtype=torch.float64), torch.tensor([lower + width], dtype=torch.float64)
    found = Interval.enclosing(*exact, torch.float32)
    assert found.lower.dtype == torch.float32
    assert found.lower.double().item() <= exact[0].item()
    assert found.upper.double().item() >= exact[1].item()
    assert found.width.item() <= width * (1 + 1e-6) + 4 * torch.finfo(torch.float32).eps * (abs(lower) + width + 1e-38)


class Shifted(nn.Module):
    """``(x₀ + shift, 0)``."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
            self.layer.bias.copy_(torch.tensor([shift, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def verdict_of(shift: float, threshold: float = 0.0, output: list[dict[str, Any]] | None = None) -> Any:
    halfspaces = [{"coefficients": [1.0, 0.0], "threshold": threshold}] if output is None else output
    module = Shifted(shift)
    batch = read(box(output=halfspaces), 2, 2).batch([0], LIKE)
    return certify(
        NetworkEngine(prepared(module, 2)),
        CounterexampleChecker(module, RankGroup()),
        METHODS["crown"],
        BoundOptions(),
        batch,
    )


@pytest.mark.parametrize(
    ("shift", "threshold", "verdict"),
    first_fast(
        4,
        [
            (1.5, 0.4, Verdict.VERIFIED),
            (1.5, 0.6, Verdict.UNKNOWN),
            (1.0 + 1e-6, 0.0, Verdict.UNKNOWN),
            (-0.1, 0.0, Verdict.FALSIFIED),
            (1.5, 0.0, Verdict.VERIFIED),
            (1.0, 0.0, Verdict.UNKNOWN),
        ],
    ),
)
def test_verdicts_of_a_halfspace(shift: float, threshold: float, verdict: Verdict) -> None:
    """x₀ is in [−1, 1]: a margin within rounding proves nothing, and a centre that violates falsifies."""
    outcome = verdict_of(shift, threshold)
    assert outcome.verdicts == (verdict,)
    assert outcome.margin.item() == pytest.approx(shift - 1 - threshold, abs=1e-5)


def test_every_halfspace_must_hold() -> None:
    both = [{"coefficients": [1.0, 0.0], "threshold": 0.0}, {"coefficients": [-1.0, 0.0], "threshold": -2.0}]
    assert verdict_of(1.5, output=both[:1]).verdicts == (Verdict.VERIFIED,)
    assert verdict_of(1.5, output=both).verdicts == (Verdict.UNKNOWN,)


def test_without_halfspaces_there_are_bounds_and_no_claim() -> None:
    outcome = verdict_of(0.0, output=[])
    assert outcome.verdicts == (Verdict.UNKNOWN,)
    assert outcome.margin.item() == torch.inf
    torch.testing.assert_close(outcome.output.lower, torch.tensor([[-1.0, 0.0]]))
    torch.testing.assert_close(outcome.output.upper, torch.tensor([[1.0, 0.0]]))


def test_a_violation_that_float64_does_not_confirm_does_not_count() -> None:
    class Rounding(nn.Module):
        """Zero, but for the rounding of float32, which makes it negative."""

        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.one * 2.0**25 - 2.0**25) - x

    module = Rounding()
    point = Interval.point(torch.tensor([[0.5]]))
    batch = InstanceBatch([0], point, torch.ones(1, 1, 1), torch.zeros(1, 1), point.lower, [[below({0: 1.0}, 0.0)]])
    assert module(point.lower).item() < 0
    assert module.double()(point.lower.double()).item() == 0
    module.float()
    assert CounterexampleChecker(module, RankGroup()).violated(batch).tolist() == [False]


def test_misclassified_samples_and_only_those_are_falsified() -> None:
    module = mlp([64, 16, 10], nn.ReLU(), seed=3)
    asked = read(robustness(count=60, eps=1e-4), 64, 10)
    batch = asked.batch(range(60), LIKE)
    outcome = certify(
        NetworkEngine(prepared(module, 64)),
        CounterexampleChecker(module, RankGroup()),
        METHODS["crown"],
        BoundOptions(),
        batch,
    )
    exact = module.double()(batch.witnesses.double())
    wrong = torch.einsum("brk,bk->br", batch.rows.double(), exact).amin(dim=1) < 0
    assert [verdict is Verdict.FALSIFIED for verdict in outcome.verdicts] == wrong.tolist()
    assert 0 < int(wrong.sum()) < 60
    assert Verdict.VERIFIED in outcome.verdicts
