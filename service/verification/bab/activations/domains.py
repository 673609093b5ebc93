"""Holds domains of a search over activations, and the pool in which they wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from service.bounds.memory import UNLIMITED, MemoryBudget, is_out_of_memory
from service.verification.bab.settings import PoolSettings
from service.verification.bab.split_tree import UNKNOWN

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Domains:
    """A batch; every column has one row for each domain.

    ``margin`` ``(n,)`` is proved; ``disjunct`` ``(n,)`` numbers the disjunct in question. ``index``, ``sign``,
    ``at`` and ``beta`` ``(n, depth)`` are the splits and their multipliers, a sign of 0 none. ``weights``
    ``(n, rows)`` combine the disjunct's rows; ``slopes`` ``(n, parameters)`` choose the relaxations. An
    optimiser continues from the last three. ``lower`` and ``upper`` ``(n, clipped)`` are bounds of the entries that are
    clipped, which hold where a counterexample may be. ``node`` ``(n,)`` is the domain's place in the search's record
    (:mod:`~service.verification.bab.split_tree`).
    """

    margin: Tensor
    disjunct: Tensor
    index: Tensor
    sign: Tensor
    at: Tensor
    beta: Tensor
    weights: Tensor
    slopes: Tensor
    lower: Tensor
    upper: Tensor
    node: Tensor

    def __len__(self) -> int:
        return len(self.margin)

    @property
    def columns(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def depth(self) -> int:
        return self.index.shape[1]

    @property
    def bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def with_(self, **columns: Tensor) -> Domains:
        return Domains(**{**self.columns, **columns})

    def rows(self, which: Tensor | slice) -> Domains:
        """Return the domains at an index, a mask or a slice."""
        return Domains(**{name: column[which] for name, column in self.columns.items()})

    def each(self) -> Iterator[Domains]:
        """Yield the domains one by one."""
        return (self.rows(slice(index, index + 1)) for index in range(len(self)))

    def repeat(self, times: int) -> Domains:
        """Repeat each domain: the first ``times`` rows are of the first domain."""
        return Domains(**{name: column.repeat_interleave(times, dim=0) for name, column in self.columns.items()})

    def to(self, device: torch.device) -> Domains:
        return Domains(**{name: column.to(device) for name, column in self.columns.items()})

    def split_further(self, index: Tensor, sign: Tensor, at: Tensor, beta: Tensor) -> Domains:
        """Add one more split to each domain, ``(n,)``, in a column of its own."""
        new = {"index": index, "sign": sign, "at": at, "beta": beta}
        return self.with_(**{name: torch.cat([self.columns[name], new[name][:, None]], dim=1) for name in new})

    def pad(self, count: int, depth: int) -> Domains:
        """Fill up to ``count`` domains with copies of the last, and to ``depth`` columns of splits."""
        which = torch.arange(count, device=self.margin.device).clamp(max=len(self) - 1)
        return Domains(**{name: _widen_column(column[which], name, depth) for name, column in self.columns.items()})

    def cut(self, depth: int) -> Domains:
        """Keep the first ``depth`` columns of splits."""
        return self.with_(**{name: self.columns[name][:, :depth] for name in _HISTORY})

    def pack(self) -> Domains:
        """Move splits to the front, and leave out columns without any."""
        order = (self.sign == 0).to(torch.int8).argsort(dim=1, stable=True)
        depth = int((self.sign != 0).sum(dim=1).max()) if len(self) else 0
        histories = {name: self.columns[name].gather(1, order)[:, :depth] for name in ("index", "sign", "at", "beta")}
        return self.with_(**histories)

    @staticmethod
    def join(parts: list[Domains]) -> Domains:
        depth = max(part.depth for part in parts)
        return Domains(
            **{name: torch.cat([_widen_column(part.columns[name], name, depth) for part in parts]) for name in _NAMES}
        )


_NAMES = tuple(field.name for field in fields(Domains))
_MARGIN_LAST = tuple(sorted(_NAMES, key="margin".__eq__))
"""The margin is written last and marks a slot as full: if memory runs out midway, the slot stays empty."""
_HISTORY = ("index", "sign", "at", "beta")
_FIXED = ("weights", "slopes", "lower", "upper")


def _widen_column(column: Tensor, name: str, depth: int) -> Tensor:
    if name not in _HISTORY:
        return column
    return torch.nn.functional.pad(column, (0, depth - column.shape[1]))


class DomainPool:
    """Holds open domains in slots; new domains fill free slots."""

    def __init__(self, like: Domains, memory: MemoryBudget = UNLIMITED, settings: PoolSettings | None = None) -> None:
        self.memory, self.settings = memory, settings or PoolSettings()
        self._store = like.rows(slice(0, 0))
        self._free: list[int] = []
        self._open = 0

    def __len__(self) -> int:
        return self._open

    @property
    def bound(self) -> float:
        """Return the least margin of an open domain, +inf if there is none."""
        return float(self._store.margin.min()) if self._open else float("inf")

    def bound_of(self, disjunct: int) -> float:
        """Return the least margin of an open domain of one disjunct, +inf if there is none."""
        margins = self._store.margin[self._store.disjunct == disjunct]
        return float(margins.min()) if len(margins) else float("inf")

    def count_of(self, disjunct: int) -> int:
        """Return how many domains of one disjunct are open."""
        return len(self._slots_of(disjunct))

    @property
    def disjuncts(self) -> Tensor:
        """Return the disjuncts of open domains, each once."""
        found: Tensor = torch.unique(self._store.disjunct[self._store.margin < torch.inf])
        return found

    @property
    def depth(self) -> int:
        """Return an upper bound of the splits in an open domain."""
        return self._store.depth

    @property
    def device(self) -> torch.device:
        return self._store.margin.device

    def put(self, domains: Domains) -> None:
        """Put domains of any device into the pool."""
        if not len(domains):
            return
        self._reserve(len(domains), domains.depth)
        domains = domains.to(self.device)
        slots = torch.tensor(self._free[-len(domains) :][::-1], dtype=torch.int64).to(self.device)
        columns = self._store.columns
        for name in _MARGIN_LAST:
            columns[name][slots] = _widen_column(domains.columns[name], name, self._store.depth).to(columns[name].dtype)
        del self._free[-len(domains) :]
        self._open += len(domains)

    def take(self, count: int) -> Domains:
        """Take the ``count`` domains with the least margins, on the pool's device; if many wait, those with the
        largest.

        A nearly proved domain leaves the fewest descendants, so that the pool does not grow for ever.
        """
        return self.take_as(lambda domains: domains, count)

    def take_as(self, form: Callable[[Domains], T], count: int) -> T:
        """Take ``count`` domains in the form that ``form`` makes; none leaves the pool if memory runs out."""
        margins = self._store.margin
        if self._store.bytes // max(1, len(margins)) * self._open > self.settings.crowded_bytes:
            # Domains without a bound get the least number, so that no empty slot precedes them.
            margins = torch.where(margins < torch.inf, -margins.clamp(min=torch.finfo(margins.dtype).min), torch.inf)
        # Stable, so that ranks that search together take the same ones wherever their pools are.
        slots = margins.argsort(stable=True)[: min(count, self._open)]
        taken = form(self._store.rows(slots).pack())  # before a slot is emptied: memory may run out
        self._empty(slots)
        return taken

    def drop(self, disjunct: int) -> None:
        """Drop all domains of one disjunct."""
        self._empty(self._slots_of(disjunct))

    def replace(self, disjunct: int, domains: Domains) -> None:
        """Replace all domains of one disjunct; if memory runs out, they stay."""
        before = self._slots_of(disjunct)
        self.put(domains)
        self._empty(before)

    def _slots_of(self, disjunct: int) -> Tensor:
        open_ = (self._store.disjunct == disjunct) & (self._store.margin < torch.inf)
        return open_.nonzero().squeeze(1)

    def _empty(self, slots: Tensor) -> None:
        free = slots.tolist()
        self._store.margin[slots.to(self.device)] = torch.inf
        self._free += free
        self._open -= len(slots)

    def _reserve(self, count: int, depth: int) -> None:
        missing = count - len(self._free)
        if missing <= 0 and depth <= self._store.depth:
            return
        host, held = torch.device("cpu"), self._store.bytes
        divisor = self.settings.memory_divisor
        if self.device.type != "cpu" and held > (self.memory.free(self.device) + held) // divisor:
            self._store = self._store.to(host)
        try:
            self._grow(missing, depth)
        except Exception as error:
            if self.device.type == "cpu" or not is_out_of_memory(error):
                raise
            self._store = self._store.to(host)
            self._grow(missing, depth)

    def _grow(self, missing: int, depth: int) -> None:
        size, wide = len(self._store), self._store.depth
        if depth > wide:
            wide = max(depth, wide + wide // 2)
        extra = max(missing, size // 2) if missing > 0 else 0
        columns = {}
        for name, column in self._store.columns.items():
            before = _widen_column(column, name, wide)
            columns[name] = torch.cat([before, before.new_zeros(extra, *before.shape[1:])])
        columns["margin"][size:] = torch.inf
        self._store = Domains(**columns)
        self._free += range(size, size + extra)


@dataclass(frozen=True, eq=False)
class DomainTransfer:
    """A :class:`~service.verification.bab.search_group.WorkTransfer`; ``like`` are domains of the same search.

    A row has all columns of a domain; last come as many splits as the width allows.
    """

    pool: DomainPool
    like: Domains

    @property
    def width(self) -> int:
        return sum(self._sizes) + len(_HISTORY) * self.pool.depth

    @property
    def _sizes(self) -> list[int]:
        """Return the widths of the columns of fixed width."""
        return [1, 1, *(self.like.columns[name].shape[1] for name in _FIXED)]

    def give(self, count: int, width: int) -> Tensor:
        depth = self._depth(width)

        def rows(domains: Domains) -> Tensor:
            fixed = (domains.columns[name] for name in _FIXED)
            same = [domains.margin[:, None], domains.disjunct[:, None], *fixed]
            splits = [_widen_column(domains.columns[name], name, depth) for name in _HISTORY]
            return torch.cat([each.double() for each in (*same, *splits)], dim=1)

        return self.pool.take_as(rows, count)

    def receive(self, rows: Tensor) -> None:
        sizes = [*self._sizes, *[self._depth(rows.shape[1])] * len(_HISTORY)]
        margin, disjunct, *others = torch.split(rows, sizes, dim=1)
        columns = {"margin": margin[:, 0], "disjunct": disjunct[:, 0]}
        columns |= dict(zip((*_FIXED, *_HISTORY), others, strict=True))
        columns["node"] = torch.full_like(margin[:, 0], UNKNOWN)
        self.pool.put(
            Domains(**{name: column.to(self.like.columns[name].dtype) for name, column in columns.items()}).pack()
        )

    def _depth(self, width: int) -> int:
        return (width - sum(self._sizes)) // len(_HISTORY)
