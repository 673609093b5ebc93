"""The most that tensors take at a time while something runs on this rank, storage by storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from service.parallel import collectives


def peak_bytes(run: Callable[[], Any]) -> int:
    """Of what is made by ``run`` alone; collectives with their copies, without what a backend takes."""
    census = _Census()
    with census:
        run()
    return census.most


class _Census(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self.held: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if namespace == "trivet":
            with self:
                return _KERNELS[name](*args)
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
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
        self.most = max(self.most, self.now)


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "copy_to_group": lambda x, group: torch.clone(x),
    "reduce_from_group": collectives._sum,
    "gather_from_group": collectives._gather,
    "gather_with_reduce_from_group": collectives._gather,
    "scatter_to_group": collectives._slice,
    "reduce_scatter_to_group": collectives._reduce_scatter,
}
