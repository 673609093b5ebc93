"""Memory of the host that ends early: torch's allocations fail beyond a limit, as a full CUDA device's do."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from peak_storage import StorageCount
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from service.bounds.memory import MemoryBudget, MemoryMeter


class LimitedMemory(StorageCount, MemoryMeter):
    """While it is entered, an operation fails whose results would make the tensors alive take more than ``limit``.

    Tensors count from the operation that made them, those of ``modules`` from the start. ``refused`` counts failures.
    """

    def __init__(self, limit: int, *modules: nn.Module) -> None:
        super().__init__()
        self.limit, self.refused = limit, 0
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._count(tensor.untyped_storage())

    def used(self, device: torch.device) -> int:
        return self.now

    def free(self, device: torch.device) -> int:
        return max(0, self.limit - self.now)

    def _count(self, storage: Any) -> None:
        size = storage.nbytes() if storage._cdata not in self.held else 0
        if self.now + size > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError(f"out of memory. Tried to allocate {size / 1024:.2f} KiB.")
        super()._count(storage)


@dataclass(frozen=True)
class Claims(MemoryMeter):
    """What a device says whose memory another process takes a moment later."""

    bytes: int = 2**40
    taken: int = 0

    def used(self, device: torch.device) -> int:
        return self.taken

    def free(self, device: torch.device) -> int:
        return self.bytes


OPTIMISTIC = MemoryBudget(meter=Claims())
"""For plans that fail."""


def size_of(module: nn.Module) -> int:
    """Bytes of its parameters and buffers."""
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


class RandomFailures(TorchDispatchMode):
    """While it is entered, any operation fails with a probability, as if memory had run out; ``count`` counts those."""

    def __init__(self, seed: int, probability: float) -> None:
        super().__init__()
        self.random, self.probability, self.count = random.Random(seed), probability, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.random.random() < self.probability:
            self.count += 1
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 1.00 MiB.")
        return func(*args, **(kwargs or {}))
