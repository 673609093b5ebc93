"""A stand-in for CUDA graphs, on the CPU: every run of a graph writes into the memory of its last one.

The rules are those of ``torch._inductor.cudagraph_trees``: graphs form a tree, each with its results, saved tensors
and gradients in memory of its own per place in the tree; a new generation begins at the root again. What it cannot
show: that memory is also shared between different places of the tree, kernels, streams, and what capture refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from service.parallel.boundary.lifetimes import address_of


class Watched(Protocol):
    generation: int


class Replays:
    """Graphs under replay. ``generation`` tells which generation a run belongs to."""

    def __init__(self, generation: Callable[[], int] = lambda: 0) -> None:
        self.generation = generation
        self.recorded, self.replayed = 0, 0
        self._root = self._current = _Place()
        self._known = -1
        self._functions = count()
        self.backend: Callable[..., Any] = aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)

    def follow(self, watch: Watched) -> None:
        """Begin at the root again where ``watch`` sees replays begin."""
        self.generation = lambda: watch.generation

    def _compile(self, graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        function = next(self._functions)

        def run(*inputs: Any) -> Any:
            place = self._enter(function)
            return place.placed(graph(*inputs), inputs, self)

        boxed: Callable[..., Any] = make_boxed_func(run)
        return boxed

    def _enter(self, function: int) -> _Place:
        now = self.generation()
        if now != self._known:
            self._known, self._current = now, self._root
        self._current = self._current.children.setdefault(function, _Place())
        return self._current


class _Place:
    """A graph at its place in the tree. ``memory`` are the storages of its results, as bytes."""

    def __init__(self) -> None:
        self.children: dict[int, _Place] = {}
        self.memory: list[Tensor] = []

    def placed(self, results: Sequence[Any], inputs: Sequence[Any], replays: Replays) -> list[Any]:
        """The results, copied into this place's memory; those in the memory of an input stay there."""
        given = {address_of(value) for value in inputs if isinstance(value, Tensor)}
        own = {
            address_of(value): _bytes(value)
            for value in results
            if isinstance(value, Tensor) and address_of(value) not in given
        }
        self._fit([len(content) for content in own.values()], replays)
        fresh = dict(zip(own, self._filled(own.values()), strict=True))
        return [
            _like(value, fresh[address_of(value)])
            if isinstance(value, Tensor) and address_of(value) in fresh
            else value
            for value in results
        ]

    def _fit(self, sizes: list[int], replays: Replays) -> None:
        """Record anew where the sizes are others."""
        if [len(each) for each in self.memory] == sizes:
            replays.replayed += 1
        else:
            replays.recorded += 1
            self.memory = [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def _filled(self, contents: Any) -> Iterator[Tensor]:
        for memory, content in zip(self.memory, contents, strict=True):
            memory.copy_(content)
            # The same bytes under a storage of its own, whose life is that of the result.
            yield torch.from_numpy(memory.numpy())


def _bytes(tensor: Tensor) -> Tensor:
    """All of the tensor's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """``tensor`` as it stands, in ``memory``."""
    placed = torch.empty(0, dtype=tensor.dtype)
    return placed.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
