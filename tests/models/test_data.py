"""Data sets and the order of their batches."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.jobs.spec.data import DataSpec, DigitsData, SyntheticData, TokensData
from service.models import data
from service.models.data import sources

sizes = st.integers(1, 60)


def test_digits_are_real_images_with_the_last_fifth_held_out() -> None:
    digits = data.load(DigitsData())
    assert digits.train.inputs.shape == (1438, 64)
    assert digits.test.inputs.shape == (359, 64)
    assert digits.train.inputs.dtype == torch.float32
    assert (digits.train.inputs.min(), digits.train.inputs.max()) == (0, 1)
    assert digits.train.targets.bincount().min() > 100
    assert digits.test.targets.bincount(minlength=10).min() > 20


@pytest.mark.slow
def test_digits_are_what_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits

    digits, theirs = data.load(DigitsData()), load_digits()
    for part in ("inputs", "targets"):
        ours = torch.cat([getattr(digits.train, part), getattr(digits.test, part)])
        expected = torch.from_numpy(theirs.data).float() / 16 if part == "inputs" else torch.from_numpy(theirs.target)
        assert torch.equal(ours, expected)


def test_targets_are_the_next_token_and_no_sample_is_in_both_splits() -> None:
    tokens = data.load(TokensData(sequence=32))
    inputs = torch.cat([tokens.train.inputs, tokens.test.inputs])
    targets = torch.cat([tokens.train.targets, tokens.test.targets])
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    assert bytes(inputs.flatten()[:4000].tolist()).decode().isprintable() is False
    assert "statement" in bytes(inputs.flatten().tolist()).decode(errors="replace")
    assert len(tokens.test) == len(inputs) // 10


def test_sequence_longer_than_the_corpus_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"data\.sequence=100000 cuts the corpus of \d+ bytes into [45] samples"):
        data.load(TokensData(sequence=100_000))


def test_a_python_without_its_documentation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sources.python_reference.cache_clear()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match="pydoc_data"):
        data.load(TokensData())


@pytest.mark.parametrize("spec", [DigitsData(), TokensData(), SyntheticData(features=5, classes=3, samples=100)])
def test_loading_twice_gives_the_same_content_and_digest(spec: DataSpec) -> None:
    first, second = data.load(spec), data.load(spec)
    assert first.sha256 == second.sha256
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert torch.equal(first.test.targets, second.test.targets)


def test_digests_tell_contents_apart() -> None:
    assert data.load(SyntheticData(samples=100)).sha256 != data.load(SyntheticData(samples=101)).sha256


def test_synthetic_labels_use_all_classes() -> None:
    assert data.load(SyntheticData(classes=4)).train.targets.unique().tolist() == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), samples=sizes, global_batch=sizes, epochs=st.integers(1, 4))
def test_every_epoch_visits_every_sample_once(seed: int, samples: int, global_batch: int, epochs: int) -> None:
    order = data.BatchOrder(seed, samples, global_batch)
    steps = -(-epochs * samples // global_batch)
    row = torch.cat([order.indices(step) for step in range(steps)])
    for epoch in range(epochs):
        visited = row[epoch * samples : (epoch + 1) * samples]
        assert visited.sort().values.tolist() == list(range(samples))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), samples=sizes, ranks=st.integers(1, 6), share=sizes, step=st.integers(0, 10_000))
def test_shares_of_any_layout_make_up_the_same_batch(
    seed: int, samples: int, ranks: int, share: int, step: int
) -> None:
    order = data.BatchOrder(seed, samples, ranks * share)
    shares = [order.share(step, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat(shares), order.indices(step))
    assert torch.equal(order.indices(step), data.BatchOrder(seed, samples, ranks * share).indices(step))


def test_epochs_and_seeds_differ() -> None:
    first = data.BatchOrder(1, 50, 50)
    assert not torch.equal(first.indices(0), first.indices(1))
    assert not torch.equal(first.indices(0), data.BatchOrder(2, 50, 50).indices(0))
    assert not torch.equal(first.indices(1), data.BatchOrder(2, 50, 50).indices(0))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="global_batch=10 does not divide over 3"):
        data.BatchOrder(0, 50, 10).share(0, 0, 3)


@pytest.mark.parametrize(("samples", "batch"), [(0, 1), (1, 0)])
def test_empty_orders_are_refused(samples: int, batch: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        data.BatchOrder(0, samples, batch)
