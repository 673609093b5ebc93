"""The most that tensors take at a time while something runs on this rank, storage by storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from service.parallel import collectives


def peak_bytes(run: Callable[[], Any]) -> int:
    """Of what is made by ``run`` alone; collectives with their copies, without what a backend takes."""
    return _counted(run).most


def largest_bytes(run: Callable[[], Any]) -> int:
    """Of a single tensor that ``run`` makes."""
    return _counted(run).largest


def _counted(run: Callable[[], Any]) -> StorageCount:
    count = StorageCount()
    with count:
        run()
    return count


def peak_allocated(run: Callable[[], Any], folder: Path) -> int:
    """The same, by torch's allocator of CPU memory: also where tracers run, whose tensors StorageCount would meet.

    Tensors in mapped files of ``folder`` take no memory that is not the system's to drop. The allocator tells of them
    by the files' sizes alone, and they are left out.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    mapped = {file.stat().st_size for file in folder.rglob("*.safetensors")}
    events = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return max(accumulate(size for size in sizes if abs(size) not in mapped), default=0)


class StorageCount(TorchDispatchMode):
    """Bytes of the tensors that are alive of those made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.largest = 0, 0, 0
        self.held: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if namespace == "trivet":
            with self:
                return _KERNELS[name](*args)
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            # A tracer's tensors have no memory.
            if type(each) in (Tensor, nn.Parameter) and not torch._is_functional_tensor(each):
                self._count(each.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.held:
            return

        def gone(_: object) -> None:
            self.now -= size
            del self.held[key]

        self.held[key] = weakref.ref(storage, gone)
        self.now += size
        self.most, self.largest = max(self.most, self.now), max(self.largest, size)


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "copy_to_group": lambda x, group: torch.clone(x),
    "reduce_from_group": collectives._sum,
    "gather_from_group": collectives._gather,
    "gather_with_reduce_from_group": collectives._gather,
    "scatter_to_group": collectives._slice,
    "reduce_scatter_to_group": collectives._reduce_scatter,
}
