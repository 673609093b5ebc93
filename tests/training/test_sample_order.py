"""The order of samples: a permutation of each epoch, computed where a list would be too long."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples

from service.models import data
from service.models.data import order


@pytest.mark.slow
@settings(max_examples=examples(15, 60), deadline=None)
@given(samples=st.integers(1, 3000), key=st.text(max_size=5))
def test_the_order_without_a_list_is_a_permutation(samples: int, key: str) -> None:
    visited = order.scatter(torch.arange(samples), samples, key)
    assert visited.sort().values.tolist() == list(range(samples))


def test_the_order_of_a_huge_set_takes_no_list() -> None:
    huge = data.BatchOrder(seed=1, samples=2**40 + 12345, global_batch=4096)
    first, second = huge.indices(0), huge.indices(1)
    assert len(first.unique()) == 4096
    assert not set(first.tolist()) & set(second.tolist())
    assert 0 <= int(first.min()) < 2**40 // 100
    assert 0.45 < float(first.double().mean()) / 2**40 < 0.55
    assert torch.equal(first, data.BatchOrder(seed=1, samples=2**40 + 12345, global_batch=4096).indices(0))


def test_epochs_without_a_list_visit_every_sample_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "LARGEST_LIST", 10)
    batches = data.BatchOrder(seed=7, samples=30, global_batch=20)
    row = torch.cat([batches.indices(step) for step in range(3)]).tolist()
    assert sorted(row[:30]) == sorted(row[30:]) == list(range(30))
    assert row[:30] != row[30:]
