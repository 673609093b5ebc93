"""Computes the order in which a run visits its samples, and feeds each rank its batches."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from service.models.data.sources import Samples, Split
from service.models.randomness import drawn, seed_all

LARGEST_LIST = 2**26
"""The most samples whose permutation is kept as a list (half a gigabyte); beyond, it is computed."""
ROUNDS = 6


@dataclass(frozen=True)
class BatchOrder:
    """Says which samples make up the batch of a step: a pure function, the same for every layout.

    The batches cut one endless row of sample indices into pieces of ``global_batch``; each epoch of
    ``samples`` entries in that row is a permutation drawn from ``(seed, epoch)``. A batch may straddle epochs.
    """

    seed: int
    samples: int
    global_batch: int

    def __post_init__(self) -> None:
        if self.samples < 1 or self.global_batch < 1:
            raise ValueError(f"samples={self.samples} and global_batch={self.global_batch} must be at least 1")

    def indices(self, step: int) -> Tensor:
        """Return the sample indices of the ``step``-th batch (from 0), int64 ``(global_batch,)``."""
        position, end = step * self.global_batch, (step + 1) * self.global_batch
        pieces: list[Tensor] = []
        while position < end:
            epoch, offset = divmod(position, self.samples)
            last = min(offset + end - position, self.samples)
            pieces.append(self._piece(epoch, offset, last))
            position += last - offset
        return torch.cat(pieces)

    def share(self, step: int, rank: int, ranks: int) -> Tensor:
        """Return the part of the batch that data-parallel ``rank`` of ``ranks`` computes."""
        if self.global_batch % ranks:
            raise ValueError(f"global_batch={self.global_batch} does not divide over {ranks} data-parallel ranks")
        size = self.global_batch // ranks
        return self.indices(step)[rank * size : (rank + 1) * size]

    def _piece(self, epoch: int, first: int, last: int) -> Tensor:
        """Return entries ``first`` to ``last`` (excluded) of an epoch's permutation."""
        if self.samples <= LARGEST_LIST:
            return _permutation(self.seed, epoch, self.samples)[first:last]
        return scatter(torch.arange(first, last), self.samples, f"{self.seed}:{epoch}")


def scatter(positions: Tensor, samples: int, key: str) -> Tensor:
    """Return where a keyed permutation of ``range(samples)`` takes each position, without a list of them all.

    A Feistel network permutes the next power of four; what falls outside the range goes through it again until it is
    inside (Black & Rogaway, 2002, "cycle walking"), four times at most on average.
    """
    half = max((samples - 1).bit_length() + 1, 2) // 2
    found = _feistel(positions, half, key)
    while bool((outside := found >= samples).any()):
        found[outside] = _feistel(found[outside], half, key)
    return found


def _feistel(values: Tensor, half: int, key: str) -> Tensor:
    mask = (1 << half) - 1
    left, right = values >> half, values & mask
    for turn in range(ROUNDS):
        secret = int.from_bytes(hashlib.sha256(f"{key}:{turn}".encode()).digest()[:4], "little")
        left, right = right, left ^ (_mix(right ^ secret) & mask)
    return left << half | right


def _mix(values: Tensor) -> Tensor:
    """Mix the lower 32 bits (the finaliser of MurmurHash3); a product keeps them even where it wraps."""
    low = 0xFFFF_FFFF
    values = (values ^ values >> 16) * 0x85EB_CA6B & low
    values = (values ^ values >> 13) * 0xC2B2_AE35 & low
    return values ^ values >> 16


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, samples: int) -> Tensor:
    """Return a permutation seeded by a hash, so that neighbouring seeds and epochs share nothing."""
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randperm(samples, generator=generator)


class Feed(Protocol):
    def batch(self, step: int) -> Split:
        """Return this rank's share of the ``step``-th batch (from 0)."""


@dataclass(frozen=True)
class _ResidentFeed:
    """Feeds samples that lie on the device."""

    samples: Samples
    order: BatchOrder
    rank: int
    ranks: int

    def batch(self, step: int) -> Split:
        return self.samples.take(self.order.share(step, self.rank, self.ranks))


class StreamFeed:
    """Feeds samples from disk: a thread reads the next batch while training uses this one.

    Copies to a CUDA device leave from pinned memory and do not block the host.
    """

    def __init__(self, resident: _ResidentFeed, device: torch.device) -> None:
        self._source, self._device = resident, device
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._ahead: dict[int, Future[Split]] = {}

    def batch(self, step: int) -> Split:
        reading = self._ahead.get(step) or self._reader.submit(self._read, step)
        self._ahead = {step + 1: self._reader.submit(self._read, step + 1)}
        batch = reading.result()
        inputs, targets = (each.to(self._device, non_blocking=True) for each in (batch.inputs, batch.targets))
        return Split(inputs, targets)

    def _read(self, step: int) -> Split:
        batch = self._source.batch(step)
        if self._device.type != "cuda":
            return batch
        return Split(batch.inputs.pin_memory(), batch.targets.pin_memory())


@dataclass(frozen=True)
class _DrawingFeed:
    """Feeds samples whose source draws random numbers where they are taken, as for a random crop: from a seed of their
    own, and not ahead, as generators are those of the whole process, in which a step draws too.
    """

    resident: _ResidentFeed
    device: torch.device

    def batch(self, step: int) -> Split:
        seed_all(self.resident.order.seed, "samples", step, self.resident.rank)
        return self.resident.batch(step).to(self.device)


def open_feed(samples: Samples, order: BatchOrder, rank: int, ranks: int, device: torch.device) -> Feed:
    """Return the batches of data-parallel ``rank`` of ``ranks``; a share is a function of seed, step and rank alone. It
    may seed the generators of the process.
    """
    resident = _ResidentFeed(samples, order, rank, ranks)
    if type(samples) is Split:  # another class may draw
        return resident
    before = drawn(torch.device("cpu"))
    resident.batch(0)
    return StreamFeed(resident, device) if drawn(torch.device("cpu")) == before else _DrawingFeed(resident, device)
