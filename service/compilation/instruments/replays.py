"""Stands in for CUDA graphs on the CPU: every run of a graph writes into the memory of its last run.

The rules are those of ``torch._inductor.cudagraph_trees``: graphs form a tree, each with its results, saved tensors
and gradients in memory of its own per place in the tree; a new generation begins at the root again. What it cannot
show: that memory is also shared between different places of the tree, kernels, streams, and what capture refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from service.compilation.instruments.functions import EagerFunctions
from service.compilation.instruments.text import FRAME
from service.compilation.instruments.transfers import Transfers, on_host, with_transfers
from service.parallel.boundary import CallSite
from service.parallel.boundary.lifetimes import NOWHERE, address_of, local
from service.torch_internals.table import internal


class ReplayMonitor(Protocol):
    generation: int

    @property
    def functions(self) -> EagerFunctions:
        """Return the watch over the program's eager calls; those within a graph do not count."""

    def entering(self, inputs: Sequence[tuple[Tensor, CallSite | None]]) -> None:
        """Note that a graph runs on these inputs; each comes with the line that first reads it, if known."""

    def made(self, results: Sequence[Tensor]) -> None:
        """Note that a graph has run, and left its results in memory that it will write over."""


class Replays:
    """Graphs under replay. ``generation`` tells which generation a run belongs to.

    ``transfers`` are those of the program's eager code, from the stand-in for its ``device`` to the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.generation: Callable[[], int] = lambda: 0
        self.transfers = Transfers(device, self._owns)
        self.recorded, self.replayed = 0, 0
        self._root = self._current = _Place()
        self._known = -1
        self._functions = count()
        self.addresses: set[int] = set()
        self.monitor: ReplayMonitor | None = None
        lowering = internal("torch._dynamo.backends.common.aot_autograd")
        self._lower: Callable[..., Any] = lowering(fw_compiler=self._compile, bw_compiler=self._compile)

    def backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph; a backend for ``torch.compile``."""
        run: Callable[..., Any] = self._lower(with_transfers(graph), inputs)
        return run

    def follow(self, monitor: ReplayMonitor) -> None:
        """Begin at the root again when ``monitor`` sees replays begin."""
        self.generation = lambda: monitor.generation
        self.monitor = monitor

    def _compile(self, graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        function, elsewhere, readers = next(self._functions), _on_host(graph), _readers(graph)

        def run(*inputs: Any) -> Any:
            place = self._enter(function)
            with self.monitor.functions.suspended() if self.monitor else nullcontext():
                if self.monitor:
                    given = zip(inputs, readers, strict=True)
                    self.monitor.entering([(value, site) for value, site in given if isinstance(value, Tensor)])
                return place.place_results(graph(*inputs), inputs, elsewhere, self)

        boxed: Callable[..., Any] = internal("torch._functorch._aot_autograd.utils.make_boxed_func")(run)
        return boxed

    def _owns(self, tensor: Tensor) -> bool:
        """Return whether a graph's results are, or were, in the tensor's memory."""
        return address_of(tensor) != NOWHERE and local(tensor).untyped_storage().data_ptr() in self.addresses

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

    def place_results(
        self, results: Sequence[Any], inputs: Sequence[Any], elsewhere: frozenset[int], replays: Replays
    ) -> list[Any]:
        """Return the results, copied into this place's memory; those in the memory of an input, or ``elsewhere``, by
        their number, stay there.
        """
        hosted = (results[index] for index in elsewhere)
        given = {NOWHERE, *(address_of(value) for value in (*inputs, *hosted) if isinstance(value, Tensor))}
        own = {
            address_of(value): _bytes(value)
            for value in results
            if isinstance(value, Tensor) and address_of(value) not in given
        }
        self._fit([len(content) for content in own.values()], replays)
        fresh = dict(zip(own, self._fill_memory(own.values()), strict=True))
        is_own = [isinstance(value, Tensor) and address_of(value) in fresh for value in results]
        placed = [
            _like(value, fresh[address_of(value)]) if moved else value
            for value, moved in zip(results, is_own, strict=True)
        ]
        if replays.monitor:
            replays.monitor.made([value for value, moved in zip(placed, is_own, strict=True) if moved])
        return placed

    def _fit(self, sizes: list[int], replays: Replays) -> None:
        """Record anew if the sizes differ."""
        if [len(each) for each in self.memory] == sizes:
            replays.replayed += 1
        else:
            replays.recorded += 1
            self.memory = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            replays.addresses |= {memory.data_ptr() for memory in self.memory}

    def _fill_memory(self, contents: Any) -> Iterator[Tensor]:
        for memory, content in zip(self.memory, contents, strict=True):
            memory.copy_(content)
            # The same bytes under a storage of its own, whose life is that of the result.
            yield torch.from_numpy(memory.numpy())


def _on_host(graph: fx.GraphModule) -> frozenset[int]:
    """Return the numbers of the results that the graph copies to the host: no graph writes over them there."""
    host = on_host(graph)
    results: Any = graph.graph.output_node().args[0]
    return frozenset(index for index, node in enumerate(results) if node in host)


def _readers(graph: fx.GraphModule) -> list[CallSite | None]:
    """Return for each input of the graph the line that reads it first, if known."""
    return [_read_at(node) for node in graph.graph.nodes if node.op == "placeholder"]


def _read_at(node: fx.Node) -> CallSite | None:
    traces = (str(user.meta.get("stack_trace") or "") for user in node.users)
    places = next((found for trace in traces if (found := FRAME.findall(trace))), None)
    return CallSite(places[-1][0], int(places[-1][1]), places[-1][2]) if places else None


def _bytes(tensor: Tensor) -> Tensor:
    """Return all of the tensor's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return ``tensor`` with its layout, in ``memory``."""
    placed = torch.empty(0, dtype=tensor.dtype)
    return placed.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
