"""Parts on several threads: the same results in the same order, and torch as it was afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from nets import box_around, output_bounds, prepared
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import BoundOptions, ProgressMeter
from service.bounds.methods.base import are_worthwhile, side_by_side
from service.bounds.network import Network
from service.bounds.progress import OutOfTimeError, TimeLimit


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("total", "at_once"), [(7, 2), (100, 64), (5, 1), (64, 32)])
def test_parts_cover_everything_in_order_and_are_as_many_for_each_thread(total: int, at_once: int) -> None:
    parts = side_by_side(total, at_once, lambda part: (part.start, part.stop))
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == total
    assert max(stop - start for start, stop in parts) <= at_once
    assert len(parts) % 2 == 0 or total < len(parts) + 2


def test_each_part_is_computed_by_one_thread_and_without_gradients() -> None:
    weight = torch.ones(3, requires_grad=True)

    def run(part: slice) -> tuple[int, Tensor]:
        return torch.get_num_threads(), weight[part] * 2

    for threads, found in side_by_side(3, 1, run):
        assert threads == 1
        assert not found.requires_grad
    assert torch.get_num_threads() == 2


def test_an_error_of_a_part_is_raised_and_torch_has_its_threads_again() -> None:
    def run(part: slice) -> None:
        if part.start == 2:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        side_by_side(4, 1, run)
    assert torch.get_num_threads() == 2


def test_one_part_one_thread_and_gradients_need_none() -> None:
    assert are_worthwhile(3, 2)
    assert not are_worthwhile(2, 2)
    with torch.enable_grad():
        assert not are_worthwhile(3, 2)
    torch.set_num_threads(1)
    assert not are_worthwhile(3, 2)


IN_PARTS = BoundOptions(elements=2 * 72 * 10)


@pytest.fixture(scope="module")
def images() -> tuple[Network, Interval]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, 5)).double()
    return prepared(module, 2, 6, 6), box_around(torch.rand(2, 2, 6, 6, dtype=torch.float64), 0.1)


def test_progress_is_told_by_all_threads_and_ends_at_one(images: tuple[Network, Interval]) -> None:
    told = list[tuple[float, int]]()
    meter = ProgressMeter(lambda share: told.append((share, threading.get_ident())))
    output_bounds(*images, "crown", replace(IN_PARTS, progress=meter))
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert threading.get_ident() not in {thread for _, thread in told[:-1]}


def test_the_end_of_the_time_ends_all_threads(images: tuple[Network, Interval]) -> None:
    options = IN_PARTS.until(time.monotonic() + 3600)
    assert isinstance(options.progress, TimeLimit)
    limit = options.progress

    def over(share: float) -> None:
        limit.deadline = 0.0

    limit.tell = over
    with pytest.raises(OutOfTimeError):
        output_bounds(*images, "crown", options)
    assert torch.get_num_threads() == 2


def test_bounds_are_those_of_one_thread(images: tuple[Network, Interval]) -> None:
    (network, box), options = images, IN_PARTS
    parallel = output_bounds(network, box, "crown", options)
    torch.set_num_threads(1)
    alone = output_bounds(network, box, "crown", options)
    torch.testing.assert_close(parallel.lower, alone.lower, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parallel.upper, alone.upper, rtol=1e-12, atol=1e-12)
