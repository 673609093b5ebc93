"""A repeated iteration, as written or recorded; how a device with little memory limits options."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from service.bounds.methods import BoundOptions
from service.bounds.options import BYTES_FOR_AN_ELEMENT
from service.bounds.replay import WARM, Memory, Plain, RecordCache, Recorded, Repeat

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Counting:
    """An iteration on tensors that stay where they are: ``x ↦ 2x + step``, and the largest value met."""

    def __init__(self, device: str) -> None:
        self.x = torch.zeros(3, device=device)
        self.best = torch.full((3,), -torch.inf, device=device)
        self.step = torch.ones((), device=device)
        self.calls = 0

    def restart(self, x: Tensor) -> None:
        self.x.copy_(x)
        self.best.fill_(-torch.inf)
        self.step.fill_(1)

    def body(self) -> None:
        self.calls += 1
        self.x.mul_(2).add_(self.step)
        torch.maximum(self.best, self.x, out=self.best)
        self.step.sub_(3)


def expected(x: Tensor, times: int) -> tuple[Tensor, Tensor]:
    best, step = torch.full_like(x, -torch.inf), 1.0
    for _ in range(times):
        x = 2 * x + step
        best, step = torch.maximum(best, x), step - 3
    return x, best


def test_a_cache_keeps_what_was_used_last_in_one_memory() -> None:
    memories = []

    def repeat(memory: Memory) -> Repeat:
        memories.append(memory)
        return Plain()

    cache = RecordCache[int, str](repeat, most=2)
    for key, value in ((1, "one"), (2, "two")):
        cache.repeater()
        cache.keep(key, value)
    assert cache.take(3) is None
    assert cache.take(1) == "one"
    assert list(cache) == [2]  # what is taken is kept again only by who could use it
    cache.keep(1, "one")
    cache.keep(3, "three")
    assert list(cache) == [1, 3]
    assert cache.drop_oldest() == 1
    assert {id(memory) for memory in memories} == {id(cache.memory)}
    cache.clear()
    cache.repeater()
    assert len(cache) == 0
    assert memories[-1] is cache.memory
    assert memories[-1] is not memories[0]


REPLAYS = [
    pytest.param(lambda: (Plain(), "cpu"), id="plain"),
    pytest.param(lambda: (Recorded(torch.device("cuda", 0)), "cuda:0"), marks=[cuda, pytest.mark.cuda], id="recorded"),
]


@pytest.mark.parametrize("make", REPLAYS)
@pytest.mark.parametrize("times", [1, 2, 3, 7])
def test_a_body_runs_as_often_as_asked_on_whatever_its_tensors_hold(make: Callable[..., tuple], times: int) -> None:
    replay, device = make()
    counting = Counting(device)
    for start in ([0.0, 1.0, -1.0], [5.0, -2.0, 0.5], [1.0, 1.0, 1.0]):
        x = torch.tensor(start, device=device)
        counting.restart(x)
        replay.run(counting.body, times)
        for found, wanted in zip((counting.x, counting.best), expected(x, times), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@cuda
@pytest.mark.cuda
def test_what_is_recorded_is_not_run_again() -> None:
    counting, replay = Counting("cuda:0"), Recorded(torch.device("cuda", 0))
    for _ in range(3):
        replay.run(counting.body, 10)
    assert replay.record is not None
    assert counting.calls == WARM + 1


def test_parts_fit_what_memory_a_device_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    free, reserved, allocated = 5000 * BYTES_FOR_AN_ELEMENT, 900 * BYTES_FOR_AN_ELEMENT, 200 * BYTES_FOR_AN_ELEMENT
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    device = torch.device("cuda")
    options = BoundOptions().within(device)
    assert options.elements == 5700  # what torch holds without using it counts as free
    for total in (1, 10**4, 10**9):
        assert 1 <= options.passing(total) <= 4 * 5700
        assert 1 <= options.optimising(total).elements <= 5700
    assert BoundOptions(elements=100).within(device).elements == 100
    free, reserved = 0, allocated
    assert BoundOptions().within(device).elements == 1
