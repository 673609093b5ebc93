"""Samples that are not what their source declares are refused with their number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from service.jobs.plugins import IGNORED, DataConfig, Features, Samples, Tokens
from service.models.data import Dataset, Split, check_again, checked, digest_of_labels, may_ignore, without_ignored
from service.models.data.sources import Samples as OnDisk

PICTURES = Features(6, 3, shape=(1, 2, 3))
WORDS = Tokens(10, 4)


class Declared(DataConfig):
    source: Literal["digits"] = "digits"
    given: Any

    @property
    def gives(self) -> Samples:
        return self.given  # type: ignore[no-any-return]


class OfDisk:
    def __init__(self, split: Split) -> None:
        self.split, self.sequence, self.device = split, None, torch.device("cpu")

    def __len__(self) -> int:
        return len(self.split)

    def take(self, indices: Tensor) -> Split:
        return self.split.take(indices)

    def to(self, device: torch.device) -> OnDisk:
        return self


def loaded(monkeypatch: pytest.MonkeyPatch, gives: Samples, samples: OnDisk, test: OnDisk | None = None) -> Dataset:
    dataset = Dataset(samples, test or samples, "x")
    monkeypatch.setattr(checked, "SOURCES", SimpleNamespace(function=lambda name: lambda spec, layout: dataset))
    return checked.load(Declared(given=gives))


def features(*shape: int, count: int = 4) -> Split:
    return Split(torch.rand(count, *shape), torch.arange(count) % 3)


def tokens(
    change: dict[tuple[int, int], int] | None = None, targets: dict[tuple[int, int], int] | None = None
) -> Split:
    ids = torch.arange(12).view(3, 4) % 10
    split = Split(ids.clone(), ids.clone())
    for tensor, changes in ((split.inputs, change), (split.targets, targets)):
        for place, value in (changes or {}).items():
            tensor[place] = value
    return split


@pytest.mark.parametrize(
    ("gives", "split", "message"),
    [
        (Features(6, 3), features(2, 3), r"gives inputs of shape \('n', 2, 3\), and declares \('n', 6\); Features"),
        (PICTURES, features(2, 3, 1), None),
        (PICTURES, features(6), None),
        (PICTURES, features(3, 2), r"gives inputs of shape \('n', 3, 2\), and declares \('n', 1, 2, 3\)"),
        (Features(6, 3), Split(torch.rand(4, 6).double(), torch.arange(4) % 3), "inputs of torch.float64; expected"),
        (Features(6, 2), features(6), r"gives the label 2 in sample 2; expected 0 to 1, or -100"),
        (Features(6, 3), Split(torch.rand(4, 6), torch.tensor([0, IGNORED, 1, 2])), None),
        (WORDS, tokens(), None),
        (WORDS, tokens(targets={(1, 2): IGNORED}), None),
        (WORDS, tokens({(1, 2): IGNORED}), "gives the token id -100 in sample 1; expected 0 to 9$"),
        (WORDS, tokens({(2, 0): 10}), "gives the token id 10 in sample 2; expected 0 to 9$"),
        (WORDS, tokens(targets={(0, 0): -1}), "gives the label -1 in sample 0; expected 0 to 9, or -100"),
        (Tokens(10, 5), tokens(), r"ids of shape \(3, 4\) and targets of \(3, 4\); expected whole numbers of \(3, 5\)"),
    ],
)
def test_samples_are_as_declared(
    monkeypatch: pytest.MonkeyPatch, gives: Samples, split: Split, message: str | None
) -> None:
    if message is None:
        assert len(loaded(monkeypatch, gives, split).train) == len(split)
        assert len(loaded(monkeypatch, gives, OfDisk(split)).train.take(torch.arange(len(split)))) == len(split)
        return
    with pytest.raises(ValueError, match=message):
        loaded(monkeypatch, gives, split)
    on_disk = loaded(monkeypatch, gives, OfDisk(split))
    with pytest.raises(ValueError, match=message):
        on_disk.train.take(torch.arange(len(split)))


def test_inputs_and_targets_are_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"data.source='digits' gives 4 inputs and 3 targets"):
        loaded(monkeypatch, Features(6, 3), Split(torch.rand(4, 6), torch.arange(3)))


def test_a_sample_is_named_by_its_number_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = features(6, count=9)
    wrong.inputs[7, 2] = torch.nan
    found = loaded(monkeypatch, Features(6, 3), features(6), OfDisk(wrong))
    with pytest.raises(ValueError, match=r"the test split of data.source='digits' .* not finite: nan in sample 7"):
        found.test.take(torch.tensor([8, 7, 0]))


def test_a_reader_that_needs_every_label_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(torch.rand(2, 6), torch.tensor([0, IGNORED]))
    assert may_ignore(split)
    assert not may_ignore(Split(split.inputs, torch.tensor([-100.0])))  # a number to be predicted is no label
    with pytest.raises(ValueError, match="a search needs a label for each sample; some are -100"):
        without_ignored(loaded(monkeypatch, Features(6, 3), split), "a search")
    found = without_ignored(loaded(monkeypatch, Features(6, 3), OfDisk(split)), "a search")
    assert not may_ignore(found.train)
    with pytest.raises(ValueError, match=r"a search needs a label .* the label -100 in sample 1; expected 0 to 2$"):
        found.train.take(torch.tensor([1]))


@pytest.mark.parametrize("kept", [Split, lambda *tensors: OfDisk(Split(*tensors))])
@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16])
def test_labels_of_any_whole_type_are_taken_as_int64(
    monkeypatch: pytest.MonkeyPatch, kept: Any, kind: torch.dtype
) -> None:
    """In uint8, 156 and -100 are equal; of uint16, torch finds no extremes."""
    stored = kept(torch.rand(2, 6), torch.tensor([156, 3], dtype=kind))
    split = loaded(monkeypatch, Features(6, 200), stored).train
    taken = split.take(torch.arange(2))
    assert not may_ignore(taken)
    assert taken.targets.tolist() == [156, 3]
    assert taken.targets.dtype == torch.int64
    with pytest.raises(ValueError, match="the label 156 in sample 0; expected 0 to 99, or -100"):
        loaded(monkeypatch, Features(6, 100), stored).train.take(torch.arange(2))


class ReadingOn(OfDisk):
    """Goes on where it was, as an iterator does, whatever it is asked for."""

    position = 0

    def take(self, indices: Tensor) -> Split:
        self.position += len(indices)
        return super().take((indices + self.position) % len(self))


@pytest.mark.parametrize("of_test", [False, True])
def test_a_source_that_gives_others_when_it_is_asked_again_is_named(
    monkeypatch: pytest.MonkeyPatch, of_test: bool
) -> None:
    splits: list[Any] = [OfDisk(features(6)), ReadingOn(features(6, count=40))]
    name = "the test split of data.source='digits'" if of_test else "^data.source='digits'"
    with pytest.raises(ValueError, match=f"{name} gives other samples when the same ones are taken again"):
        check_again(loaded(monkeypatch, Features(6, 3), *(splits if of_test else splits[::-1])))


def test_a_split_without_samples_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty(OfDisk):
        def take(self, indices: Tensor) -> Split:
            raise AssertionError

    check_again(loaded(monkeypatch, Features(6, 3), Empty(features(6, count=0)), OfDisk(features(6))))


def test_batches_of_a_source_are_taken_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both splits may seek in one file."""

    class Reading(OfDisk):
        def take(self, indices: Tensor) -> Split:
            assert dataset is None or not test.lock.acquire(blocking=False)
            return super().take(indices)

    dataset: Dataset | None = None
    dataset = loaded(monkeypatch, Features(6, 3), Reading(features(6)), Reading(features(6)))
    test: Any = dataset.test
    assert len(dataset.train.take(torch.arange(2))) == 2


def test_answers_of_yes_and_no_stay_so() -> None:
    answers = torch.tensor([True, False])
    assert torch.equal(Split(torch.rand(2, 6), answers).take(torch.arange(2)).targets, answers)


def test_labels_in_another_order_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = (Split(torch.rand(6, 6), torch.arange(6).roll(turn) % 3) for turn in (0, 1))
    digests = [
        digest_of_labels(loaded(monkeypatch, Features(6, 3), split))
        for split in (own, other, Split(torch.rand(6, 6), own.targets), OfDisk(own))
    ]
    assert digests[0] == digests[2] == digests[3] != digests[1]
