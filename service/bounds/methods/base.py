"""Defines the interface of bounding methods and of their analyses, which bound the inputs of non-linear
operators and any output rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from service.bounds.flat import by_instance, by_row
from service.bounds.graph import Node
from service.bounds.interval import ORDINARY, Interval
from service.bounds.linear.plain import Pass
from service.bounds.linear.propagation import traverse_backward
from service.bounds.linear.rows.patches import Pair, image_of
from service.bounds.memory import in_parts, is_out_of_memory
from service.bounds.network import Network
from service.bounds.options import BoundOptions

T = TypeVar("T")


MOST = 8
"""Most threads; more would wait for Python's lock."""


def are_worthwhile(total: int, at_once: int) -> bool:
    """Return whether there are threads for more than one part, and no gradient, whose graph is built in one thread."""
    return total > at_once and torch.get_num_threads() > 1 and not torch.is_grad_enabled()


def side_by_side(total: int, at_once: int, run: Callable[[slice], T]) -> list[T]:
    """Call ``run`` for slices of ``range(total)`` with at most ``at_once`` entries each, and no gradients.

    Torch divides each operation among its threads, which wait for each other after each; for a small part,
    waiting takes longer than the operation. Here each thread has its own parts, equally many for each.
    """
    threads = torch.get_num_threads()
    workers = min(threads, MOST, -(-total // at_once))
    rounds = -(-total // (at_once * workers))
    size = -(-total // (rounds * workers))
    parts = [slice(start, min(total, start + size)) for start in range(0, total, size)]
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        return list(pool.map(torch.no_grad()(run), parts))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


class Analysis(Protocol):
    """A network on one batch of boxes."""

    @property
    def inputs(self) -> Mapping[str, tuple[Interval, ...]]:
        """Return bounds on the inputs of each non-linear node, by its name; this rank's entries where divided."""

    def lower_bounds(self, rows: Tensor) -> Tensor:
        """Return lower bounds ``(batch, rows)`` of ``rows · output``, rows ``(batch or 1, rows, *output shape)``."""


class PlaneAnalysis(Analysis, Protocol):
    """An analysis that also gives affine functions of the model's input below rows of the output."""

    def planes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return coefficients ``(batch, rows, features)`` and constants ``(batch, rows)`` of the functions.

        ``rows`` ``(batch or 1, rows, outputs)`` are flat. All ranks that have a part of the network call it.
        """


Bounder = Callable[[Network, Interval, BoundOptions], Analysis]
"""``(network, box, options)``; the box is ``(batch, *input shape)``, replicated over the tensor-parallel ranks."""


class IntermediateBounds(Enum):
    """The ways to bound the inputs of non-linear nodes, from the loosest to the tightest."""

    INTERVALS = "intervals"
    LINEAR = "linear"
    OPTIMISED = "optimised"


@dataclass(frozen=True)
class Method:
    """A bounding method: how it bounds a network in either arithmetic, and how it is shown.

    ``name`` is what a specification calls it. ``plain`` bounds in the box's own floating-point type, rounded to
    nearest; ``rigorous`` accounts for every rounding, and takes networks and boxes of float64. ``optimises`` says that
    the slopes of relaxations are optimised for the rows of the output. Called, a method bounds in plain arithmetic.
    """

    name: str
    plain: Bounder
    rigorous: Callable[[Network, Interval, BoundOptions], PlaneAnalysis]
    intermediate: IntermediateBounds
    optimises: bool = False

    def __call__(self, network: Network, box: Interval, options: BoundOptions) -> Analysis:
        return self.plain(network, box, options)

    @property
    def label(self) -> str:
        """Return the method's name in results, which adds details to a spec's name."""
        is_fixed = self.optimises and self.intermediate is not IntermediateBounds.OPTIMISED
        return f"{self.name} (fixed intermediate bounds)" if is_fixed else self.name


@dataclass(frozen=True, eq=False)
class LinearAnalysis:
    """An analysis that answers by one backward pass, or by several if there are many rows."""

    backward: Pass
    inputs: Mapping[str, tuple[Interval, ...]]
    options: BoundOptions

    def lower_bounds(self, rows: Tensor) -> Tensor:
        network = self.backward.network
        at_once = passing_at_once(self.backward, network.graph.output.name, rows.shape[1], self.options)

        def bounds(part: slice) -> Tensor:
            found = self.backward.lower_bounds(network.graph.output.name, rows[:, part])
            if self.options.progress is not None:
                self.options.progress.add(network.graph.output.name, found.shape[1], rows.device)
            return found

        found = joined(parts_of_rows(self.backward, rows.shape[1], at_once, bounds))
        return no_looser_than_intervals(self.backward, rows, found, self.options)


COMPARED = 2**24
"""Terms of rows of an interval that are added up at once."""


def no_looser_than_intervals(backward: Pass, rows: Tensor, found: Tensor, options: BoundOptions) -> Tensor:
    """Return, for each row of the output, the tighter of its linear bounds and its interval's."""
    network = backward.network
    interval = backward.intervals.get(network.graph.output.name)
    if interval is None or not options.intersect or network.is_own(network.graph.output.name) or found.requires_grad:
        return found
    # Nothing times an infinite width is NaN, which drops both ends: the other one may be meaningless, as for empty
    # shares.
    lower, upper = by_instance(interval.lower), by_instance(interval.upper)
    lost = (upper - lower) * 0
    lower, upper = lower + lost, upper + lost
    at_once = max(1, COMPARED // max(1, lower.numel()))
    parts = [rows] if rows.shape[1] <= at_once else torch.split(rows, at_once, dim=1)
    known = [_least_of_asked(lower, upper, by_row(part)) for part in parts]
    return torch.maximum(found, joined(known))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return results ``(batch, rows)`` of all parts; those of a single one are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=1)


def _least_of_asked(lower: Tensor, upper: Tensor, rows: Tensor) -> Tensor:
    """Return the least values ``(batch, rows)``, −∞ if a row has a coefficient at an entry whose ends are NaN."""
    ends = torch.where(rows > 0, lower.unsqueeze(1), upper.unsqueeze(1))
    terms = (rows * ends).masked_fill_(rows == 0, 0)
    total, size = terms.sum(dim=2), torch.linalg.vector_norm(terms, 1, dim=2)
    # As for the spread of an interval, the margins of verdicts cover sums of small terms.
    rounding = size.sub_(ORDINARY).clamp_(min=0)
    eps = torch.finfo(total.dtype).eps
    return torch.sub(total, rounding, alpha=8 * eps).nan_to_num_(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def rows_at_once(backward: Pass, start: str, options: BoundOptions) -> int:
    """Return how many rows of ``start`` may be bounded together; the same number on every rank of the group."""
    return max(1, options.elements // elements_of_row(backward, start))


IN_CACHE = 2**22
"""Elements of a part on a CPU: products of fewer rows read the weights too often, and larger tensors leave its caches
and are new memory, which the system fills with zeros first.
"""


def passing_at_once(backward: Pass, start: str, rows: int, options: BoundOptions) -> int:
    """Return how many of ``rows`` rows may go together in one plain pass."""
    each = elements_of_row(backward, start)
    return fitting(backward.device, each, options.passing(rows * each))


def fitting(device: torch.device, each: int, most: int) -> int:
    """Return how many rows of so many elements go together in one plain pass of at most so many."""
    return max(1, (most if device.type == "cuda" else min(most, IN_CACHE)) // each)


def parts_of_rows(backward: Pass, total: int, at_once: int, run: Callable[[slice], T]) -> list[T]:
    """Call ``run`` for ``at_once`` of ``total`` rows at a time, fewer if memory runs out and no other rank
    waits; on a CPU, several parts run side by side.
    """
    if backward.device.type == "cpu" and backward.network.is_alone and are_worthwhile(total, at_once):
        try:
            return side_by_side(total, at_once, run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    return in_parts(total, at_once, run, backward.device, alone=backward.network.is_alone)


def elements_of_row(backward: Pass, start: str) -> int:
    return elements_of_a_row(backward.network, start, backward.batch, divided=backward.divided)


def elements_of_a_row(network: Network, start: str, batch: int, *, divided: bool = False) -> int:
    """Return the elements of a row in the largest coefficient tensor of one rank, which that rank's own device must
    hold.

    If ``start`` is divided, each rank has its own rows at first, and later every rank has all rows. Rows are
    ``divided`` like those of a pass.
    """
    before = 0 if network.before is None else network.before.entries
    entries = network.planned(_entries_of_a_row, start, divided=divided)
    return batch * network.shares(start) * max(entries, before)


PatchSize = Pair | None
"""Height and width of a row's patch; ``None`` for a whole row."""


def _entries_of_a_row(network: Network, start: str, *, divided: bool = False) -> int:
    """Return the entries of the largest value between ``start`` and the input, or of the largest patch where rows stay
    in patches.

    They count for one tensor-parallel rank and each row that all of them bound: its share of a divided value, and all
    of a replicated one, or a share of the rows if those are ``divided``.
    """
    image = image_of(network.nodes[start].shape) is not None and network.tp_group.axis.size == 1
    sizes = _RowSizes(network, network.tp_group.axis.size if divided else 1)
    nodes = network.graph.nodes[network.position[start] :: -1]
    traverse_backward(nodes, {start: (1, 1) if image else None}, sizes.propagate, sizes.join)
    return sizes.largest


@dataclass(eq=False)
class _RowSizes:
    """The arithmetic of sizes alone."""

    network: Network
    ranks: int
    largest: int = field(default=1)

    def propagate(self, node: Node, patch: PatchSize) -> Iterable[tuple[str, PatchSize]]:
        entries = _entries(node, patch)
        self.largest = max(self.largest, entries if self.network.is_own(node.name) else -(-entries // self.ranks))
        if patch is not None and node.name == self.network.entrance:
            return ()
        return [(name, _size_before(self.network, node, index, patch)) for index, name in enumerate(node.inputs)]

    @staticmethod
    def join(name: str, first: PatchSize, second: PatchSize) -> PatchSize:
        if first is None or second is None:
            return None
        return (max(first[0], second[0]), max(first[1], second[1]))


def _entries(node: Node, patch: PatchSize) -> int:
    image = image_of(node.shape)
    if patch is None or image is None:
        return node.size
    return min(node.size, image[0] * patch[0] * patch[1])


def _size_before(network: Network, node: Node, index: int, patch: PatchSize) -> PatchSize:
    if patch is None or image_of(node.input_shapes[index]) is None:
        return None
    return network.any_operator_of(node).patch_before(node, index, patch)
