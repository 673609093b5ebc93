"""The model under verification: a network to bound, a module to attack, and what confirms a counterexample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.memory import MemoryBudget, MemoryShortageError, in_parts, is_out_of_memory, make_room
from service.bounds.methods import METHODS, Bounder, Effort
from service.bounds.network import Network, prepare
from service.bounds.stages import Staged
from service.verification.bab.heuristics import Heuristics
from service.verification.bab.search_group import SINGLE_RANK, SearchGroup
from service.verification.bab.specification import Specification
from service.verification.certify import bounds_by

if TYPE_CHECKING:
    from service.bounds.onnx.model import Running


T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class ModelUnderVerification:
    """A model in the forms that a search needs, on this rank.

    ``module`` and ``network`` are in ``dtype``; ``float64_module`` is the module in float64, ``runtime`` onnxruntime
    for a model that came from ONNX. The ranks of ``search_group`` decide together. Where the search is ``rigorous``
    only bounds that hold in real arithmetic close a domain; ``network`` is then in float64. For a model in stages
    ``network`` is this rank's, and all stages decide alike. ``effort`` is for bounds that are optimised, and has the
    memory for everything; ``heuristics`` choose what is split.
    """

    module: nn.Module
    network: Network
    float64_module: nn.Module
    runtime: Running | None
    dtype: torch.dtype
    search_group: SearchGroup = SINGLE_RANK
    rigorous: bool = False
    staged: Staged | None = None
    effort: Effort = field(default_factory=Effort)
    heuristics: Heuristics = field(default_factory=Heuristics)

    @classmethod
    def of(cls, data: bytes, dtype: torch.dtype, device: torch.device = CPU) -> ModelUnderVerification:
        """Read a model from an ONNX file's content. Raises ``UnsupportedModelError``."""
        from service.bounds.onnx import load  # noqa: PLC0415 - brings onnxruntime, which only these models need
        from service.bounds.onnx.reading import Runtime, parse  # noqa: PLC0415

        module = load(data).to(device, dtype)
        float64_module = load(data).to(device, torch.float64)
        return cls(module, prepare(module, (module.features,)), float64_module, Runtime.of(parse(data)), dtype)

    @property
    def device(self) -> torch.device:
        if self.staged is not None:
            return self.staged.line.device
        held = (*self.float64_module.parameters(), *self.float64_module.buffers())
        return held[0].device if held else torch.device("cpu")

    def late(self, deadline: float) -> bool:
        """Whether ``deadline`` (``time.monotonic``) has passed for any of the ranks; all must ask together."""
        over = self.network.exchange.largest(int(time.monotonic() > deadline), self.device)
        return bool(over if self.staged is None else self.staged.line.joined(torch.tensor([over])).any())

    @property
    def memory(self) -> MemoryBudget:
        return self.effort.memory

    @property
    def is_alone(self) -> bool:
        """Whether this rank has the whole model, so that no other waits for a step of it."""
        return self.network.is_alone and self.staged is None

    def least(self, count: int) -> int:
        """Return the smallest number of the ranks that have the model together; all of them call it."""
        own = self.network.exchange.least(count, self.device)
        return own if self.staged is None else int(self.staged.line.joined(torch.tensor([own])).min())

    def in_parts(self, total: int, at_once: int, run: Callable[[slice], T]) -> list[T]:
        """Run ``run`` for some of ``total`` inputs at a time, fewer where memory runs out and no other rank waits."""
        return in_parts(total, at_once, run, self.device, alone=self.is_alone)

    def survives(self, error: Exception) -> bool:
        """Whether a search can go on with less after this error: memory ran out, and no other rank waits."""
        return is_out_of_memory(error) and (self.is_alone or isinstance(error, MemoryShortageError))

    def together(self, stage: str, run: Callable[[], T]) -> T:
        """Return the result of ``run``, in which no rank of the search group asks another.

        Raises :class:`~service.bounds.memory.MemoryShortageError` on all of them where memory ran out on one.
        """
        shortage = None
        try:
            found = run()
        except Exception as error:
            if not self.survives(error):
                raise
            shortage = self.memory.shortage(stage, self.device, error)
        if shortage is not None:
            make_room(self.device)
        if self.search_group.anywhere(shortage is not None, self.device):
            raise shortage or MemoryShortageError("there was not enough for another rank of the search", stage)
        return found

    @property
    def entries(self) -> int:
        """The number of entries of all of the model's values; the same on all ranks of a model in stages."""
        own = sum(node.size for node in self.network.graph.nodes)
        return own if self.staged is None else self.staged.entries

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs for inputs ``(n, features)``, differentiable.

        On tensor-parallel ranks they are equal to the last bit, as decisions from them have to be.
        """
        exchange = self.network.exchange
        return exchange.agree(self.module(exchange.agree(x)))

    def method(self, name: str) -> Bounder:
        """Return the bounding method of that name; for a model in stages, one that all stages run together."""
        found = METHODS[name].rigorous if self.rigorous else METHODS[name].plain
        return found if self.staged is None else self.staged.method(found)

    def output_bounds(self, box: Interval, name: str) -> Interval:
        """Bound all outputs ``(outputs,)`` in one box ``(1, features)`` of ``dtype`` by the method of that name."""
        method = METHODS[name].rigorous if self.rigorous else METHODS[name].plain
        return bounds_by(method, self.staged or self.network, box, self.effort)

    @torch.no_grad()
    def convinced(self, specification: Specification, candidates: Tensor) -> tuple[float, ...] | None:
        """Return the first candidate ``(n, features)`` that violates the property in float64 and in onnxruntime, or
        ``None``.

        Each is moved into the exact box or ball first, and its outputs are compared exactly. Of a box without a float64
        input, what the nearest one misses may change the outputs; where the search is rigorous, rounding may, too.
        """
        exchange = self.network.exchange
        exact = exchange.agree(specification.nearest(candidates.double()))
        outputs = exchange.agree(self.float64_module(exact))
        suspects = specification.per_disjunct(specification.excess(outputs)).amin(dim=1) <= 0
        for instance, found in zip(exact[suspects][:8], outputs[suspects][:8], strict=True):
            x = instance.tolist()
            if specification.reached(x, Interval.point(found)) and self._confirmed(specification, instance, found):
                return tuple(x)
        return None

    def _confirmed(self, specification: Specification, instance: Tensor, outputs: Tensor) -> bool:
        if self.runtime is not None:
            there = torch.from_numpy(self.runtime.flat(np.asarray(instance.cpu()))).to(instance.device)
            if not specification.reached(instance.tolist(), Interval.point(self.network.exchange.agree(there))):
                return False
        missed = specification.missed > 0
        if self.rigorous:
            around = Interval(
                torch.where(missed, specification.lower, instance), torch.where(missed, specification.upper, instance)
            )
            enclosed = self.output_bounds(around.map(lambda end: end[None]), "ibp")
        elif bool(missed.any()):
            enclosed = self._drifted(instance, outputs, specification.missed)
        else:
            return True
        return specification.reached(instance.tolist(), enclosed)

    def _drifted(self, instance: Tensor, outputs: Tensor, missed: Tensor) -> Interval:
        """Bound where outputs ``(outputs,)`` go, to first order and twice that, when the input moves by ``missed``."""
        with torch.enable_grad():
            x = instance[None].to(self.dtype).requires_grad_()
            found = self.outputs(x)[0]
            slopes = [torch.autograd.grad(each, x, retain_graph=True)[0][0] for each in found]
        drift = 2 * self.network.exchange.agree(torch.stack(slopes).double().abs() @ missed)
        far = torch.full_like(outputs, torch.inf)
        return Interval(torch.nextafter(outputs - drift, -far), torch.nextafter(outputs + drift, far))


def worst_first(values: Tensor, count: int) -> Sequence[int]:
    """Return the indices of the ``count`` smallest values."""
    return values.topk(min(count, len(values)), largest=False).indices.tolist()
