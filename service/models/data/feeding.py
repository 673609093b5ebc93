"""Feeds the batches of one rank, on its device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from service.models.data.order import BatchOrder
from service.models.data.samples import Samples, Split


class Feed(Protocol):
    def batch(self, step: int) -> Split:
        """Return this rank's share of the ``step``-th batch (from 0)."""


@dataclass(frozen=True)
class ResidentFeed:
    """A feed of samples that lie on the device."""

    samples: Samples
    order: BatchOrder
    rank: int
    ranks: int

    def batch(self, step: int) -> Split:
        return self.samples.take(self.order.share(step, self.rank, self.ranks))


class StreamFeed:
    """A feed of samples that are read where they lie: a thread reads the next batch while this one is trained on.

    Copies to a CUDA device leave from pinned memory and don't hold the host up.
    """

    def __init__(self, resident: ResidentFeed, device: torch.device) -> None:
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


def open_feed(samples: Samples, order: BatchOrder, rank: int, ranks: int, device: torch.device) -> Feed:
    """Return the batches of data-parallel ``rank`` of ``ranks``; a share is a function of seed, step and rank alone."""
    resident = ResidentFeed(samples, order, rank, ranks)
    return resident if isinstance(samples, Split) else StreamFeed(resident, device)
