"""Analyses one network batch by batch: on a CUDA device, by replaying records.

An analysis of few boxes is hundreds of small kernels, whose launches take longer than the work. Its rows depend
on the boxes, but a record's cannot: a record has a few more than earlier analyses needed, and counts whether
that was enough. If not, the analysis is done directly, and the next record has more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from service.bounds.buffers import own_copy
from service.bounds.interval import Interval
from service.bounds.memory import is_out_of_memory, make_room
from service.bounds.methods.base import Analysis, Bounder, LinearAnalysis, elements_of_a_row
from service.bounds.methods.passes import Passes
from service.bounds.methods.record import Noted, Plan, Record, planned
from service.bounds.network import Network
from service.bounds.options import BoundOptions
from service.bounds.replay import Memory, RecordCache, Recorded, Repeat

LOG = logging.getLogger(__name__)
WORTHWHILE = 2**29
"""Coefficients of all rows beyond which kernels take longer than their launches."""
TENSORS = 8
"""Most tensors of the size of the largest coefficients in a pass."""
SHARE = 8
"""Largest share of the free memory for all records."""
MOST = 4
"""Shapes of boxes that are kept."""
TRIES = 8
"""Records of one shape, each with more rows than the one before."""


@dataclass(frozen=True)
class _Shape:
    network: Network
    options: BoundOptions
    of: type[Interval]
    size: torch.Size
    dtype: torch.dtype


@dataclass(eq=False)
class _ShapeRecord:
    """Facts about one shape of boxes: the most rows needed, the record if there is one, and how often it was made."""

    plan: Plan = field(default_factory=dict)
    record: Record | None = None
    tries: int = 0


@dataclass(eq=False)
class Repeating:
    """A method for repeated analyses of a network, under ``torch.no_grad()``, alone on its ranks.

    The first analysis of boxes of one shape is direct, the second is recorded, the rest replay the record. Results
    stay valid after later analyses. The records end with this object, or when memory is needed elsewhere.
    """

    passes: Passes
    known: RecordCache[_Shape, _ShapeRecord]
    turn: int = 0

    @classmethod
    def by(cls, passes: Passes, repeat: Callable[[Memory], Repeat]) -> Repeating:
        """Return the method with records that ``repeat`` makes in some memory."""
        return cls(passes, RecordCache(repeat, MOST))

    @classmethod
    def on(cls, device: torch.device, passes: Passes) -> Repeating:
        return cls.by(passes, lambda memory: Recorded(device, memory))

    def __call__(self, network: Network, box: Interval, options: BoundOptions) -> Analysis:
        if network.tp_group.axis.size > 1 or network.before is not None or torch.is_grad_enabled():
            return self.passes(network, box, options)
        shape = _Shape(network, options, type(box), box.lower.shape, box.lower.dtype)
        known = self.known.take(shape)
        self.known.keep(shape, newest := known or _ShapeRecord())
        if known is None:
            return self.as_written(newest, network, box, options)
        record = self._taking(known, network, box, options)
        if record is None:
            return self.passes(network, box, options)
        self.turn += 1
        return _Replayed(_Asked(self, known, network, box, options), record, self.turn)

    def as_written(self, known: _ShapeRecord, network: Network, box: Interval, options: BoundOptions) -> LinearAnalysis:
        """Analyse without a record, and plan the next record by the rows needed now."""
        noted = Noted()
        found = self.passes.bounded(network, box, self.passes.affordable(network, box, options), noted)
        known.plan, known.record = planned(network, len(box.lower), noted.found, known.plan), None
        return found

    def _taking(self, known: _ShapeRecord, network: Network, box: Interval, options: BoundOptions) -> Record | None:
        """Return the record of this shape, perhaps a new one, with the bounds of the box."""
        if known.record is not None:
            known.record.take(box)
        elif known.tries < TRIES and self._has_room(known.plan, network, box, options):
            known.tries += 1
            affordable = self.passes.affordable(network, box, options)
            within = self.known.repeat, self.known.memory
            try:
                known.record = Record(network, self.passes, affordable, own_copy(box), known.plan, *within)
            except RuntimeError as error:  # an operator that reads from the device, or too little memory after all
                LOG.warning("%s is not recorded: %s: %s", self.passes.name, type(error).__name__, error)
                known.tries = TRIES
                self.forget()
        return known.record

    def _has_room(self, plan: Plan, network: Network, box: Interval, options: BoundOptions) -> bool:
        """Return whether there is memory for one more record, perhaps after all others were dropped."""
        each = [2 * rows.count * elements_of_a_row(network, name, len(box.lower)) for name, rows in plan.items()]
        if sum(each) > WORTHWHILE:
            return False
        need = TENSORS * max(each, default=0) * box.lower.element_size()
        limit = options.memory.free(box.lower.device) // SHARE
        if self.known.memory.bytes + need > limit:
            self.forget()
        return need <= limit

    def forget(self) -> None:
        """Drop all records, including that of the last analysis."""
        self.turn += 1
        for known in self.known.values():
            known.record = None
        self.known.renew_memory()


def repeatedly(method: Bounder, device: torch.device) -> Bounder:
    """Return a method whose analyses on a device are many."""
    return Repeating.on(device, method) if isinstance(method, Passes) and device.type == "cuda" else method


@dataclass(frozen=True, eq=False)
class _Asked:
    repeated: Repeating
    known: _ShapeRecord
    network: Network
    box: Interval
    options: BoundOptions

    @torch.no_grad()
    def as_written(self, *, noting: bool) -> LinearAnalysis:
        given = self.network, self.box, self.options
        return self.repeated.as_written(self.known, *given) if noting else self.repeated.passes(*given)


@dataclass(frozen=True, eq=False)
class _Replayed:
    """An analysis that a record holds until the next one; it is computed directly if no record holds it."""

    asked: _Asked
    record: Record
    turn: int

    @cached_property
    def inputs(self) -> Mapping[str, tuple[Interval, ...]]:
        return own_copy(self.record.analysis.inputs) if self._is_held else self._written.inputs

    def lower_bounds(self, rows: Tensor) -> Tensor:
        if not self._is_held:
            return self._written.lower_bounds(rows)
        try:
            return self.record.lower_bounds(rows)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self.asked.repeated.forget()
        make_room(rows.device)
        return self._written.lower_bounds(rows)

    @property
    def _is_latest(self) -> bool:
        return self.turn == self.asked.repeated.turn

    @property
    def _is_held(self) -> bool:
        return self._is_latest and self.record.suffices

    @cached_property
    def _written(self) -> LinearAnalysis:
        return self.asked.as_written(noting=self._is_latest)
