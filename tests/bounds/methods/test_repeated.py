"""Methods whose analyses are many: what is replayed is what is written, whatever the boxes are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples, slow_but_for
from limited_memory import Claims
from nets import Residual, ball_around, box_around, mlp, prepared, redraw
from operator_groups import GROUPS, made
from recording_without_device import Rehearsed
from torch import Tensor, nn
from verify_jobs import robustness

from service.bounds.interval import Interval
from service.bounds.memory import MemoryBudget
from service.bounds.methods import METHODS, Analysis, BoundOptions, layers, repeatedly
from service.bounds.methods import record as module_of_rows
from service.bounds.methods import repeated as module_of_repeated
from service.bounds.methods.passes import Passes
from service.bounds.methods.repeated import TRIES, Repeating
from service.bounds.network import Network, prepare
from service.bounds.rank_group import RankGroup
from service.bounds.replay import Memory, Plain, Recorded
from service.verification.certify import certify
from service.verification.counterexamples import CounterexampleChecker
from service.verification.engine import NetworkEngine
from service.verification.properties import read

PASSES = [name for name, method in METHODS.items() if isinstance(method.plain, Passes)]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 2, stride=2)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x.view(-1, 1, 4, 4)))))
        return self.last(hidden.flatten(1))


def images() -> nn.Module:
    module = Images()
    redraw(module, torch.Generator().manual_seed(5), scale=1.0)
    return module


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "relu": (lambda: mlp([5, 40, 30, 20, 3], nn.ReLU(), seed=1), 5),
    "tanh": (lambda: mlp([5, 12, 12, 3], nn.Tanh(), seed=1), 5),
    "residual": (lambda: nn.Sequential(*(Residual(6, nn.ReLU()) for _ in range(3))), 6),
    "images": (images, 16),
}


@cache
def network_of(name: str) -> tuple[Network, int]:
    build, features = NETS[name]
    return prepared(build().double(), features), features


def rehearsed(name: str, repeat: Callable[[], Any] = Rehearsed) -> Repeating:
    method = METHODS[name].plain
    assert isinstance(method, Passes)
    return Repeating.by(method, lambda memory: repeat())


def boxes(count: int, batch: int, features: int, radii: tuple[float, ...] = (0.1,)) -> list[Interval]:
    generator = torch.Generator().manual_seed(9)
    drawn = torch.randn(count, batch, features, generator=generator, dtype=torch.float64)
    return [box_around(x, radii[index % len(radii)]) for index, x in enumerate(drawn)]


@torch.no_grad()
def assert_same(found: Analysis, expected: Analysis, rows: Tensor) -> None:
    torch.testing.assert_close(found.lower_bounds(rows), expected.lower_bounds(rows), rtol=1e-9, atol=1e-9)
    assert list(found.inputs) == list(expected.inputs)
    for name, bounds in expected.inputs.items():
        for one, other in zip(found.inputs[name], bounds, strict=True):
            torch.testing.assert_close(one.lower, other.lower, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(one.upper, other.upper, rtol=1e-9, atol=1e-9)


def rows_for(network: Network, batch: int) -> Tensor:
    size = network.graph.output.size
    return torch.randn(batch, size + 1, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture
def no_row_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_rows, "CHEAP", 0)


@pytest.mark.parametrize("name", slow_but_for(NETS, "relu", "images"))
@pytest.mark.parametrize(
    ("method", "cheap"),
    slow_but_for([*((each, 0) for each in PASSES), ("crown", module_of_rows.CHEAP)], ("crown", 0)),
)
@torch.no_grad()
def test_what_is_replayed_is_what_would_run(
    method: str, name: str, cheap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of boxes that need few rows and many, in batches of several sizes, with rows of several shapes."""
    monkeypatch.setattr(module_of_rows, "CHEAP", cheap)
    network, features = network_of(name)
    repeated, written = rehearsed(method), METHODS[method]
    for batch in (1, 3):
        for box in boxes(7, batch, features, radii=(0.02, 0.02, 0.05, 0.2)):
            found, expected = repeated(network, box, BoundOptions()), written(network, box, BoundOptions())
            for rows in (rows_for(network, 1), rows_for(network, batch)[:, :2]):
                assert_same(found, expected, rows)
    records = [known.record for known in repeated.known.values() if known.record is not None]
    assert records
    assert any(record._layers.tape is not None for record in records)


@settings(max_examples=examples(2, 6), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.01, 0.1, 1.0])), min_size=3, max_size=8))
@torch.no_grad()
def test_any_boxes_in_any_order(asked: list[tuple[int, float]]) -> None:
    network = prepared(mlp([4, 20, 20, 2], nn.ReLU(), seed=3).double(), 4)
    repeated = rehearsed("crown", Plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of_rows, "CHEAP", 0)
        for seed, (batch, radius) in enumerate(asked):
            x = torch.randn(batch, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            box = box_around(x, radius)
            assert_same(
                repeated(network, box, BoundOptions()),
                METHODS["crown"](network, box, BoundOptions()),
                rows_for(network, 1),
            )


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@torch.no_grad()
def test_no_operator_needs_the_host(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its rule forward, nor its relaxation, nor its rule backward: a tape would refuse it."""
    monkeypatch.setattr(layers, "trees_of", lambda network: {})  # what a CPU alone does looks at values
    _, network = made(group)
    repeated = rehearsed("crown")
    rows = torch.eye(network.graph.output.size, dtype=torch.float64)[None, ::4]
    *before, last = boxes(3, 2, 6)
    for box in before:
        repeated(network, box, BoundOptions()).lower_bounds(rows)
    (known,) = repeated.known.values()
    assert known.record is not None
    assert_same(repeated(network, last, BoundOptions()), METHODS["crown"](network, last, BoundOptions()), rows)


@pytest.mark.usefixtures("no_row_is_cheap")
@torch.no_grad()
def test_an_analysis_stays_true_whatever_comes_after_it() -> None:
    network, _ = network_of("relu")
    repeated, rows = rehearsed("crown"), rows_for(network, 1)
    given_boxes = boxes(5, 2, 5)
    found = [repeated(network, box, BoundOptions()) for box in given_boxes]
    inputs = found[-1].inputs
    kept = {name: [each.lower.clone() for each in bounds] for name, bounds in inputs.items()}
    for analysis, box in zip(found, given_boxes, strict=True):
        assert_same(analysis, METHODS["crown"](network, box, BoundOptions()), rows)
    repeated(network, given_boxes[0], BoundOptions()).lower_bounds(rows)
    assert all(torch.equal(a.lower, b) for name in kept for a, b in zip(inputs[name], kept[name], strict=True))


def test_batches_of_a_job_are_decided_as_if_each_was_the_only_one() -> None:
    """What was found of all of them is compared at the end: a later batch may not change an earlier one's."""
    module = mlp([64, 24, 16, 10], nn.ReLU(), seed=3).double()
    engine, checker = NetworkEngine(prepared(module, 64)), CounterexampleChecker(module, RankGroup())
    asked = read(robustness(count=30, eps=0.002), 64, 10)
    like = torch.empty(0, dtype=torch.float64)
    questions = [asked.batch(range(first, first + 6), like) for first in range(0, 30, 6)]
    repeating = rehearsed("crown")
    found, alone = (
        [certify(engine, checker, method, BoundOptions(), batch) for batch in questions]
        for method in (repeating, METHODS["crown"])
    )
    for one, other in zip(found, alone, strict=True):
        assert one.verdicts == other.verdicts
        torch.testing.assert_close(one.margin, other.margin, rtol=1e-9, atol=1e-9)
        for name, (bounds,) in other.inputs.items():
            torch.testing.assert_close(one.inputs[name][0].lower, bounds.lower, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(one.inputs[name][0].upper, bounds.upper, rtol=1e-9, atol=1e-9)
    (known,) = repeating.known.values()
    assert known.record is not None
    assert len({verdict for each in alone for verdict in each.verdicts}) > 1


@torch.no_grad()
def test_balls_are_replayed_too() -> None:
    network, _ = network_of("relu")
    repeated = rehearsed("crown")
    for x in torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64):
        ball = ball_around(x, 0.1)
        assert_same(
            repeated(network, ball, BoundOptions()),
            METHODS["crown"](network, ball, BoundOptions()),
            rows_for(network, 1),
        )


@pytest.mark.usefixtures("no_row_is_cheap")
@torch.no_grad()
def test_boxes_that_need_more_rows_get_a_record_with_more() -> None:
    network, _ = network_of("relu")
    repeated, rows = rehearsed("crown"), rows_for(network, 1)
    small, large = box_around(torch.zeros(1, 5, dtype=torch.float64), 1e-3), boxes(1, 1, 5, radii=(1.0,))[0]
    plans = []
    for box in (small, small, large, small, small):
        assert_same(repeated(network, box, BoundOptions()), METHODS["crown"](network, box, BoundOptions()), rows)
        (known,) = repeated.known.values()
        plans.append((sum(each.count for each in known.plan.values()), known.record is not None))
    assert [held for _, held in plans] == [False, True, False, True, True]
    assert plans[1][0] < plans[2][0] == plans[4][0]


@torch.no_grad()
def test_what_is_not_worth_a_record_or_cannot_be_one_runs_as_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network, _ = network_of("relu")
    rows = rows_for(network, 1)

    class Failing:
        def run(self, body: Callable[[], None], times: int) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    def held(repeated: Repeating, options: BoundOptions = BoundOptions()) -> int:  # noqa: B008 - frozen
        for box in boxes(4, 2, 5):
            assert_same(repeated(network, box, options), METHODS["crown"](network, box, options), rows)
        return sum(known.record is not None for known in repeated.known.values())

    assert held(rehearsed("crown")) == 1
    assert held(rehearsed("crown"), BoundOptions(memory=MemoryBudget(meter=Claims(1000)))) == 0
    broken = rehearsed("crown", Failing)
    assert held(broken) == 0
    assert [known.tries for known in broken.known.values()] == [TRIES]
    assert caplog.text.count("crown is not recorded") == 1
    monkeypatch.setattr(module_of_repeated, "WORTHWHILE", 1)
    assert held(rehearsed("crown")) == 0
    several = rehearsed("crown")
    with torch.enable_grad():  # of weights that are trained, which a record would leave without a gradient
        for box in boxes(4, 2, 5):
            several(network, box, BoundOptions())
    assert not several.known


@torch.no_grad()
def test_shapes_that_were_not_used_for_longest_make_room() -> None:
    network = prepared(mlp([4, 8, 2], nn.ReLU(), seed=3).double(), 4)
    repeated = rehearsed("ibp", Plain)
    for batch in (1, 2, 3, 1, 4, 5):
        repeated(network, boxes(1, batch, 4)[0], BoundOptions())
    assert [shape.size[0] for shape in repeated.known] == [3, 1, 4, 5]


def test_only_passes_on_a_cuda_device_are_worth_it() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert [name for name in METHODS if isinstance(repeatedly(METHODS[name].plain, cuda), Repeating)] == PASSES
    assert all(repeatedly(method.plain, cpu) is method.plain for method in METHODS.values())
    assert PASSES == ["ibp", "crown-ibp", "crown"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.cuda
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("method", PASSES)
@torch.no_grad()
def test_records_of_a_device_give_what_runs_there(method: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_rows, "CHEAP", 0)
    device = torch.device("cuda", 0)
    build, features = NETS[name]
    network = prepare(copy.deepcopy(build()).double().to(device), (features,))
    repeated = repeatedly(METHODS[method].plain, device)
    assert isinstance(repeated, Repeating)
    rows = rows_for(network, 1).to(device)
    for batch in (1, 3):
        for box in boxes(7, batch, features, radii=(0.02, 0.02, 0.05, 0.2)):
            there = Interval(box.lower.to(device), box.upper.to(device))
            assert_same(repeated(network, there, BoundOptions()), METHODS[method](network, there, BoundOptions()), rows)
    records = [known.record for known in repeated.known.values() if known.record is not None]
    assert any(isinstance(each._layers, Recorded) and each._layers.record is not None for each in records)
    repeated.forget()
    assert repeated.known.memory.bytes == Memory().bytes == 0
