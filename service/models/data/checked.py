"""Compares samples with what their source declares: shapes, token ids, labels, and that numbers are finite.

Samples in memory are checked when they are loaded, those on disk batch by batch. Otherwise a wrong one would be trained
on: a picture with its axes in another order, a label outside the classes that tensor parallelism takes for none.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from service.jobs.files import DataLayout
from service.jobs.plugins import IGNORED, Features, Tokens
from service.jobs.plugins import Samples as Declared
from service.jobs.spec.data import SOURCES, DataSpec
from service.models.data.sources import Dataset, Loader, Samples, Split
from service.models.held_state import digest
from service.models.randomness import seeded

_TAKEN_TWICE = 32
"""Samples on disk that are compared with themselves."""

_WITHOUT_EXTREMES = (torch.uint16, torch.uint32, torch.uint64)
"""Types of which torch finds neither the least nor the largest number."""


@dataclass(frozen=True)
class SampleCheck:
    """Compares samples with what they must be. ``name`` begins sentences about them."""

    gives: Declared
    name: str
    is_ignoring: bool

    def check(self, split: Split, indices: Tensor | None = None) -> None:
        """Raise ``ValueError`` with the number of the first sample that is not as declared; ``indices`` are those of
        the whole split.
        """
        numbers = torch.arange(len(split)) if indices is None else indices.cpu()
        if len(split.targets) != len(split):
            raise ValueError(f"{self.name} gives {len(split)} inputs and {len(split.targets)} targets")
        if isinstance(self.gives, Tokens):
            self._check_tokens(split, self.gives, numbers)
        else:
            self._check_features(split.inputs, self.gives, numbers)
        self._check_targets(split.targets, numbers)

    def _check_features(self, inputs: Tensor, gives: Features, numbers: Tensor) -> None:
        shape = tuple(inputs.shape[1:])
        if not gives.holds(shape):
            wanted = gives.shape or (gives.features,)
            raise ValueError(
                f"{self.name} gives inputs of shape {('n', *shape)}, and declares {('n', *wanted)}; Features(…, shape="
                f"{shape}) declares axes that mean something"
            )
        if inputs.is_complex() or (inputs.is_floating_point() and inputs.dtype != torch.float32):
            raise ValueError(f"{self.name} gives inputs of {inputs.dtype}; expected torch.float32")
        self._check_finite(inputs, "inputs", numbers)

    def _check_tokens(self, split: Split, gives: Tokens, numbers: Tensor) -> None:
        ids, shape = split.inputs, (len(split), gives.sequence)
        if ids.is_floating_point() or tuple(ids.shape) != shape or tuple(split.targets.shape) != shape:
            held = f"{tuple(ids.shape)} and targets of {tuple(split.targets.shape)}"
            raise ValueError(f"{self.name} gives {ids.dtype} ids of shape {held}; expected whole numbers of {shape}")
        self._check_range(ids, gives.vocabulary, numbers, "token id")

    def _check_targets(self, targets: Tensor, numbers: Tensor) -> None:
        if targets.is_floating_point():
            self._check_finite(targets, "targets", numbers)
            return
        count = self.gives.vocabulary if isinstance(self.gives, Tokens) else self.gives.classes
        self._check_range(targets, count, numbers, "label", (IGNORED,) if self.is_ignoring else ())

    def _check_range(
        self, values: Tensor, count: int, numbers: Tensor, what: str, others: tuple[int, ...] = ()
    ) -> None:
        """Check that whole numbers are below ``count`` and not negative, or among ``others``."""
        values = values.long() if values.dtype in _WITHOUT_EXTREMES else values
        if not values.numel() or (int(values.min()) >= 0 and int(values.max()) < count):
            return
        values = values.long()  # in uint8, -100 is 156
        is_wrong = (values < 0) | (values >= count)
        for other in others:
            is_wrong &= values != other
        if bool(is_wrong.any()):
            place = is_wrong.nonzero()[0].tolist()
            besides = "".join(f", or {other} for one that does not count" for other in others)
            raise ValueError(
                f"{self.name} gives the {what} {int(values[tuple(place)])} in sample {int(numbers[place[0]])}; "
                f"expected 0 to {count - 1}{besides}"
            )

    def _check_finite(self, values: Tensor, what: str, numbers: Tensor) -> None:
        if not values.numel() or all(bool(each.isfinite()) for each in values.aminmax()):
            return
        place = (~values.isfinite()).nonzero()[0].tolist()
        found = float(values[tuple(place)])
        raise ValueError(f"{self.name} gives {what} that are not finite: {found} in sample {int(numbers[place[0]])}")


@dataclass(frozen=True)
class CheckedSamples:
    """Samples on disk, each batch of which is compared with its declaration.

    Batches are taken one at a time: a thread reads ahead of a training while another takes what it evaluates, and both
    splits of a source may seek in one file.
    """

    samples: Samples
    declared: SampleCheck
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def sequence(self) -> int | None:
        return self.samples.sequence

    @property
    def device(self) -> torch.device:
        return self.samples.device

    def take(self, indices: Tensor) -> Split:
        return self.as_stored(indices).with_int64_labels()

    def as_stored(self, indices: Tensor) -> Split:
        """Return the same with labels in the source's own type."""
        with self.lock:
            taken = self.samples.take(indices)
        self.declared.check(taken, indices)
        return taken

    def check_again(self) -> None:
        """Raise ``ValueError`` if the first samples are others when they are taken again with the same random numbers:
        so they would be in a resumed run, and may be on another rank.
        """
        first, found = torch.arange(min(len(self), _TAKEN_TWICE)), set()
        for _ in range(2):
            with seeded(0, "taken twice"):
                taken = self.samples.take(first)
            found.add((digest(taken.inputs), digest(taken.targets)))
        if len(found) > 1:
            raise ValueError(
                f"{self.declared.name} gives other samples when the same ones are taken again; draw on the CPU from "
                "the generators of torch, NumPy or Python, which follow from the job's seed, or from one that is made "
                "of the indices"
            )

    def to(self, device: torch.device) -> CheckedSamples:
        return replace(self, samples=self.samples.to(device))


def load(spec: DataSpec, layout: DataLayout | None = None) -> Dataset:
    """Return the data set that ``spec`` names, compared with what its source declares. Raises ``ValueError``."""
    loader: Loader = SOURCES.function(spec.source)
    dataset = loader(spec, layout)
    names = (f"data.source={spec.source!r}", f"the test split of data.source={spec.source!r}")
    found, lock = list[Samples](), threading.Lock()
    for samples, name in zip((dataset.train, dataset.test), names, strict=True):
        declared = SampleCheck(spec.gives, name, spec.ignores)
        if isinstance(samples, Split):
            declared.check(samples)
            found.append(samples)
        else:
            found.append(CheckedSamples(samples, declared, lock))
    return replace(dataset, train=found[0], test=found[1])


def without_ignored(dataset: Dataset, reader: str) -> Dataset:
    """Return the data set for a ``reader`` for whom every label counts. Raises ``ValueError``, for samples on disk when
    one is taken, if it has others.
    """
    found: list[Samples] = []
    for samples in (dataset.train, dataset.test):
        if isinstance(samples, CheckedSamples):
            name = f"{reader} needs a label for each sample, and {samples.declared.name}"
            found.append(replace(samples, declared=replace(samples.declared, name=name, is_ignoring=False)))
        elif may_ignore(samples):
            raise ValueError(f"{reader} needs a label for each sample; some are {IGNORED}, which does not count")
        else:
            found.append(samples)
    return replace(dataset, train=found[0], test=found[1])


def check_again(dataset: Dataset) -> None:
    """Raise ``ValueError`` if a split on disk gives other samples when the same ones are taken again."""
    for samples in (dataset.train, dataset.test):
        if isinstance(samples, CheckedSamples) and len(samples):
            samples.check_again()


def may_ignore(samples: Samples) -> bool:
    """Return whether a label of these samples may be :data:`IGNORED`: of those on disk, all may. Numbers that are to be
    predicted are no labels, and all count.
    """
    if isinstance(samples, CheckedSamples):
        return samples.declared.is_ignoring
    if not isinstance(samples, Split):
        return True
    targets = samples.targets
    return targets.dtype.is_signed and not targets.is_floating_point() and bool((targets == IGNORED).any())


_LOOKED_AT = 256
"""Samples on disk whose labels are in the digest."""


def digest_of_labels(dataset: Dataset) -> str:
    """Return a digest of the labels and token ids of both splits; of those on disk, of evenly spaced samples.

    A loader must give every rank and every attempt the same samples; one that takes files in the order of a folder, or
    classes in that of a set, does not.
    """
    held = hashlib.sha256()
    for samples in (dataset.train, dataset.test):
        every = max(len(samples) // _LOOKED_AT, 1)
        take = samples.as_stored if isinstance(samples, CheckedSamples) else samples.take
        taken = samples if isinstance(samples, Split) else take(torch.arange(0, len(samples), every))
        held.update(str(len(samples)).encode())
        for values in (taken.inputs, taken.targets):
            if not values.is_floating_point():
                held.update(values.cpu().contiguous().numpy().tobytes())
    return held.hexdigest()
