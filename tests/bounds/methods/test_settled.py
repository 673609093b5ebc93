"""Iterations of α-CROWN end where they bring nothing, and what they have brought is said."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch
from nets import prepared
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import ALPHA_CROWN, CROWN, BoundOptions
from service.bounds.optimise import STRIDE, Ascent, Brought, RowOptimiser

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
    ascent = Ascent(iterations=MOST, least_gain=least_gain)
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
    ALPHA_CROWN(network, box, BoundOptions(ascent=Ascent(iterations=MOST, least_gain=-1.0)))
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


def test_what_iterations_brought_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="service.bounds.methods.alpha"):
        intermediate(nn.ReLU, 0.5, least_gain=-1.0)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("alpha-crown: ")]
    assert line.endswith("narrower, by 100% of iterations")
    assert "intermediate bounds 0.00%" not in line


def test_widths_that_are_not_finite_count_for_nothing() -> None:
    brought, inf = Brought(), torch.inf
    brought.add(torch.tensor([[2.0, inf]]), torch.tensor([[1.0, 5.0]]), iterations=5, most=20)
    assert str(brought) == "intermediate bounds 50.00% narrower, by 25% of iterations"


def test_nothing_is_divided_by_nothing() -> None:
    brought = Brought()
    brought.add(torch.zeros(1, 0), torch.zeros(1, 0), iterations=1, most=20)
    assert str(brought) == "intermediate bounds 0.00% narrower, by 0% of iterations"


def test_rows_that_are_asked_for_take_all_iterations(iterations: Counter[str]) -> None:
    network = prepared(net(nn.Tanh), 4)
    box = Interval(torch.full((1, 4), -0.2), torch.full((1, 4), 0.8))
    analysis = ALPHA_CROWN(network, box, BoundOptions(ascent=Ascent(iterations=MOST, least_gain=0.5)))
    iterations.clear()
    found: Tensor = analysis.lower_bounds(torch.eye(2)[None])
    assert iterations[network.graph.output.name] == MOST
    assert found.shape == (1, 2)


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
