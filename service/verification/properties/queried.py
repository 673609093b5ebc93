"""Reads VNN-LIB queries as a property, with one instance for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.formats.vnnlib import Bundle, Query, VnnlibError, parse, rounded_down, rounded_up, sources
from service.jobs.files import DataLayout
from service.jobs.spec.verify import VnnlibProperty
from service.verification.properties.base import InstanceBatch, PropertyError, Unnamed


@dataclass(frozen=True, eq=False)
class Queried(Unnamed):
    """The requested bounds are those on the smallest box around all boxes of a query; the search gives the verdict.

    ``names`` are the queries' paths in their archive, empty without one; ``limits`` are the seconds of search
    of each, if set.
    """

    queries: Sequence[Query]
    names: Sequence[str]
    limits: Sequence[float | None] = ()
    eps: float | None = None
    has_labels: bool = False

    @property
    def count(self) -> int:
        return len(self.queries)

    def name(self, instance: int) -> str | None:
        return self.names[instance] or None

    def seconds(self, instance: int) -> float | None:
        return self.limits[instance] if self.limits else None

    def query(self, instance: int) -> Query:
        return self.queries[instance]

    def batch(self, instances: Sequence[int], like: Tensor) -> InstanceBatch:
        lower, upper = (
            torch.stack(ends).to(like.device)
            for ends in zip(*(_around(self.queries[instance]) for instance in instances), strict=True)
        )
        box = Interval.enclosing(lower, upper, like.dtype)
        rows = like.new_zeros(len(instances), 0, self.queries[instances[0]].outputs)
        return InstanceBatch(instances, box, rows, rows[:, :, 0], (lower + upper) / 2, [()] * len(instances))


def _around(query: Query) -> tuple[Tensor, Tensor]:
    """Return the ends of the smallest box around all of the query's, float64."""
    boxes = {(id(each.lower), id(each.upper)): (each.lower, each.upper) for each in query.disjuncts}
    lower = [[rounded_down(end) for end in ends] for ends, _ in boxes.values()]
    upper = [[rounded_up(end) for end in ends] for _, ends in boxes.values()]
    return torch.tensor(lower, dtype=torch.float64).amin(dim=0), torch.tensor(upper, dtype=torch.float64).amax(dim=0)


def queried(spec: VnnlibProperty, features: int, outputs: int, layout: DataLayout | None) -> Queried:
    """Read the queries; raise :class:`PropertyError` if a file cannot be read or does not fit the model."""
    if layout is None:
        raise PropertyError("property.vnnlib needs the folder of uploaded files")
    found = [each for path, file in spec.files for each in _read(path, layout, file, (features, outputs))]
    return Queried([query for _, query in found], [name for name, _ in found])


def paired(opened: Bundle) -> Queried:
    """Read the queries of an archive's pairs, each about its own model. Raises :class:`PropertyError` if a
    query cannot be read.
    """
    queries: dict[str, Query] = {}
    for pair in opened.pairs:
        if pair.query not in queries:
            queries[pair.query] = _parse_query(f"property.instances: {pair.query}", opened.text(pair))
    pairs = opened.pairs
    return Queried(
        [queries[each.query] for each in pairs], [each.name for each in pairs], [each.seconds for each in pairs]
    )


def _read(path: str, layout: DataLayout, file: str, expected: tuple[int, int]) -> Iterator[tuple[str, Query]]:
    where = path
    try:
        for source in sources(layout.file(file)):
            where = f"{path}: {source.name}" if source.name else path
            query = _parse_query(where, source.text)
            check_sizes(where, query, expected)
            yield source.name, query
    except (OSError, VnnlibError) as error:
        raise PropertyError(f"{where}: {error}") from error


def _parse_query(where: str, text: str) -> Query:
    try:
        query = parse(text)
    except VnnlibError as error:
        raise PropertyError(f"{where}: {error}") from error
    if not query.disjuncts:
        raise PropertyError(f"{where}: no input satisfies its bounds on inputs, so there is nothing to verify")
    return query


def check_sizes(where: str, query: Query, expected: tuple[int, int]) -> None:
    """Raise :class:`PropertyError` if the query's numbers of inputs and outputs differ from the model's."""
    if (query.inputs, query.outputs) != expected:
        raise PropertyError(
            f"{where} has {query.inputs} inputs and {query.outputs} outputs, "
            f"the model has {expected[0]} and {expected[1]}"
        )
