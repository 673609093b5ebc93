"""Iterations of α-CROWN end where they bring nothing, and what they have brought is said."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch
from nets import prepared
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import ALPHA_CROWN, CROWN, BoundOptions, alpha
from service.bounds.open_rows import OpenRowsOptimiser
from service.bounds.optimise import STRIDE, Ascent, Families, Gains, RowOptimiser

MOST = 3 * STRIDE + 1


def net(activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), activation(), nn.Linear(16, 8), activation(), nn.Linear(8, 2))


@pytest.fixture
def iterations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each value's rows took a step."""
    taken, ascend = Counter[str](), RowOptimiser._ascend

    def counting(self: RowOptimiser) -> None:
        taken[self.start] += 1
        ascend(self)

    monkeypatch.setattr(RowOptimiser, "_ascend", counting)
    return taken


def intermediate(activation: type[nn.Module], eps: float, least_gain: float) -> Interval:
    network = prepared(net(activation), 4)
    ascent = Ascent(iterations=MOST, least_share=min(0.0, least_gain), least_gain=least_gain)
    box = Interval(torch.full((1, 4), 0.3 - eps), torch.full((1, 4), 0.3 + eps))
    return ALPHA_CROWN(network, box, BoundOptions(ascent=ascent)).inputs[network.nonlinear[1].name][0]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_all_iterations_are_run_where_each_counts(activation: type[nn.Module], iterations: Counter[str]) -> None:
    intermediate(activation, 0.5, least_gain=-1.0)
    assert set(iterations.values()) == {MOST}


def test_a_few_iterations_are_run_where_they_narrow_too_little(iterations: Counter[str]) -> None:
    found = intermediate(nn.Tanh, 0.5, least_gain=0.5)
    assert set(iterations.values()) == {1 + STRIDE}
    best = intermediate(nn.Tanh, 0.5, least_gain=-1.0)
    assert bool((found.lower <= best.lower).all())
    assert bool((found.upper >= best.upper).all())


def test_one_iteration_is_run_where_nothing_can_be_chosen(iterations: Counter[str]) -> None:
    """The sign of every neuron of the first layer is known on this small box; the second is bent everywhere."""
    torch.manual_seed(0)
    network = prepared(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh()), 4)
    box = Interval(torch.full((1, 4), 0.3), torch.full((1, 4), 0.3001))
    ALPHA_CROWN(network, box, BoundOptions(ascent=Ascent(iterations=MOST, least_share=-1.0, least_gain=-1.0)))
    assert set(iterations.values()) == {1}


def test_bounds_are_never_wider_than_those_of_crown() -> None:
    for activation in (nn.ReLU, nn.Tanh):
        network = prepared(net(activation), 4)
        box = Interval(torch.full((1, 4), -0.2), torch.full((1, 4), 0.8))
        options = BoundOptions(ascent=Ascent(iterations=MOST, least_gain=0.5))
        (plain, *_), (best, *_) = (
            method(network, box, options).inputs[network.nonlinear[1].name] for method in (CROWN, ALPHA_CROWN)
        )
        assert bool((best.lower >= plain.lower - 1e-6).all())
        assert bool((best.upper <= plain.upper + 1e-6).all())


def test_what_iterations_brought_is_told(caplog: pytest.LogCaptureFixture) -> None:
    network, box = prepared(net(nn.ReLU), 4), Interval(torch.full((1, 4), -0.2), torch.full((1, 4), 0.8))
    options = BoundOptions(ascent=Ascent(iterations=MOST, least_share=-1.0, least_gain=-1.0))
    analysis = ALPHA_CROWN(network, box, options)
    with caplog.at_level(logging.INFO, logger="service.bounds.methods.alpha"):
        best = analysis.lower_bounds(torch.eye(2)[None])
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("alpha-crown: ")]
    assert line.endswith("by 100% of iterations")
    plain = CROWN(network, box, options).inputs[network.nonlinear[1].name][0].width.sum()
    narrower = 1 - analysis.inputs[network.nonlinear[1].name][0].width.sum() / plain
    assert options.gains.intermediate.narrower == pytest.approx(float(narrower), abs=1e-5)
    backward = analysis.backward
    before, above = (backward.lower_bounds(network.graph.output.name, sign * torch.eye(2)[None]) for sign in (1, -1))
    gained = (best - before).sum() / (-above - before).sum()
    assert options.gains.asked.narrower == pytest.approx(float(gained), abs=1e-5)
    assert options.gains.asked.narrower > 0.001


def test_widths_that_are_not_finite_count_for_nothing() -> None:
    gains, inf = Gains(), torch.inf
    gains.intermediate.add(torch.tensor([[2.0, inf]]), torch.tensor([[1.0, 5.0]]), iterations=5, most=20)
    assert str(gains) == "intermediate bounds 50.00% narrower, by 25% of iterations"
    gains.asked.add(torch.tensor([[4.0, 4.0]]), torch.tensor([[3.0, 3.0]]), iterations=15, most=20)
    said = "intermediate bounds 50.00% narrower, bounds asked for 25.00% narrower, by 50% of iterations"
    assert str(gains) == said


def test_nothing_is_divided_by_nothing() -> None:
    gains = Gains()
    assert not gains
    gains.intermediate.add(torch.zeros(1, 0), torch.zeros(1, 0), iterations=1, most=20)
    assert str(gains) == "by 0% of iterations"


@pytest.mark.parametrize(("least_gain", "expected"), [(-1.0, MOST), (0.5, 1 + STRIDE)])
def test_rows_that_are_asked_for_take_the_iterations_that_narrow_them(
    least_gain: float, expected: int, iterations: Counter[str]
) -> None:
    network = prepared(net(nn.Tanh), 4)
    box = Interval(torch.full((1, 4), -0.2), torch.full((1, 4), 0.8))
    ascent = Ascent(iterations=MOST, least_share=min(0.0, least_gain), least_gain=least_gain)
    analysis = ALPHA_CROWN(network, box, BoundOptions(ascent=ascent))
    iterations.clear()
    found: Tensor = analysis.lower_bounds(torch.eye(2)[None])
    assert iterations[network.graph.output.name] == expected
    assert found.shape == (1, 2)


def count_optimised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries are optimised at a time from now on."""
    counted, optimise = list[int](), alpha._optimised

    def counting(families: Families, name: str, index: Tensor, options: BoundOptions) -> Interval:
        counted.append(index.shape[1])
        return optimise(families, name, index, options)

    monkeypatch.setattr(alpha, "_optimised", counting)
    return counted


@pytest.mark.parametrize(("least_gain", "pays"), [(-1.0, True), (1.0, False)])
def test_of_many_entries_some_are_tried_first(
    least_gain: float, pays: bool, iterations: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where these gain too little, all keep the bounds that CROWN has; else all are optimised."""
    monkeypatch.setattr(alpha, "LEAST_GAIN", least_gain)
    monkeypatch.setattr(alpha, "WORTH_A_TRIAL", {"cpu": 0})
    tried = count_optimised(monkeypatch)
    torch.manual_seed(0)
    wide = nn.Sequential(
        nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, alpha.MANY + 1), nn.Tanh(), nn.Linear(alpha.MANY + 1, 2)
    )
    network, box = prepared(wide, 4), Interval(torch.full((1, 4), -0.2), torch.full((1, 4), 0.8))
    value = network.nonlinear[1].name
    (found,), (plain,) = (
        method(network, box, BoundOptions(ascent=Ascent(iterations=4))).inputs[value] for method in (ALPHA_CROWN, CROWN)
    )
    assert tried == ([alpha.SOME, alpha.MANY + 1] if pays else [alpha.SOME])
    narrower = 1 - found.width.sum() / plain.width.sum()
    assert (
        float(narrower) > 1e-3
        if pays
        else torch.equal(found.lower, plain.lower) and torch.equal(found.upper, plain.upper)
    )


def test_each_instance_of_a_batch_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box in which the network is all but straight beside one where it is bent."""
    monkeypatch.setattr(alpha, "MANY", 7)
    monkeypatch.setattr(alpha, "SOME", 4)
    monkeypatch.setattr(alpha, "WORTH_A_TRIAL", {"cpu": 0})
    network = prepared(net(nn.Tanh).double(), 4)
    radius = torch.tensor([1e-4, 0.5], dtype=torch.float64)[:, None].expand(2, 4)
    boxes, value = Interval(0.3 - radius, 0.3 + radius), network.nonlinear[1].name
    options = BoundOptions(ascent=Ascent(iterations=5))
    (found,), (plain,) = (method(network, boxes, options).inputs[value] for method in (ALPHA_CROWN, CROWN))
    assert torch.equal(found.lower[0], plain.lower[0])
    assert torch.equal(found.upper[0], plain.upper[0])
    assert float(found.width[1].sum() / plain.width[1].sum()) < 1 - alpha.LEAST_GAIN


def test_what_goes_with_an_entry_changes_none_of_its_bounds() -> None:
    """One instance, and a few rows at a time, or all together."""
    network = prepared(net(nn.Tanh).double(), 4)
    centre = torch.tensor([[-0.2, 0.1, 0.3, 0.5], [2.0, -1.0, 0.0, 1.0]], dtype=torch.float64)
    boxes = Interval(centre - 0.4, centre + 0.4)
    ascent = Ascent(iterations=MOST, least_gain=2e-3)
    value = network.nonlinear[1].name
    (together,) = ALPHA_CROWN(network, boxes, BoundOptions(ascent=ascent)).inputs[value]
    for index in range(len(centre)):
        box = boxes.map(lambda end, index=index: end[index : index + 1])  # type: ignore[misc]
        (alone,) = ALPHA_CROWN(network, box, BoundOptions(ascent=ascent, elements=32 * 16 * 3)).inputs[value]
        torch.testing.assert_close(alone.lower[0], together.lower[index], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(alone.upper[0], together.upper[index], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("is_image", [False, True])
def test_rows_that_are_left_out_once_settled_have_the_bounds_that_they_had(
    batch: int, is_image: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    image = (nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Flatten())
    flat = (nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4), nn.ReLU())
    network = prepared(nn.Sequential(*(image if is_image else flat), nn.Linear(4, 3)).double(), 16)
    x = torch.rand(batch, 16, dtype=torch.float64)
    rows, passed = torch.eye(3, dtype=torch.float64)[None], list[int]()
    narrow = OpenRowsOptimiser._narrow

    def bounds() -> Tensor:
        options = BoundOptions(ascent=Ascent(iterations=MOST, least_share=0.2))
        return ALPHA_CROWN(network, Interval(x - 0.3, x + 0.3), options).lower_bounds(rows)

    def noted(self: OpenRowsOptimiser, kept: Tensor) -> None:
        passed.append(kept.shape[1])
        narrow(self, kept)

    monkeypatch.setattr(OpenRowsOptimiser, "_narrow", noted)
    found = bounds()
    assert passed
    monkeypatch.setattr(OpenRowsOptimiser, "_narrow", lambda self, kept: None)
    assert torch.allclose(found, bounds(), rtol=0, atol=1e-12)


def test_entries_that_plain_rows_settle_are_not_optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    network = prepared(net(nn.ReLU), 4)
    box = Interval(torch.full((1, 4), 0.0), torch.full((1, 4), 0.6))
    plain = CROWN(network, box, BoundOptions()).inputs[network.nonlinear[1].name][0]
    optimised = count_optimised(monkeypatch)
    best = ALPHA_CROWN(network, box, BoundOptions()).inputs[network.nonlinear[1].name][0]
    assert optimised == [int(((plain.lower < 0) & (plain.upper > 0)).sum())]
    assert 0 < optimised[0] < 8
    assert bool((best.lower >= plain.lower).all())
    assert bool((best.upper <= plain.upper).all())
