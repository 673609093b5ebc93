"""VNN-LIB queries as a property: one instance for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.jobs.layout import DataLayout
from service.jobs.spec.verify import VnnlibProperty
from service.jobs.vnnlib import Query, VnnlibError, parse, sources
from service.verification.properties.base import PropertyError, Question


@dataclass(frozen=True, eq=False)
class Queried:
    """The bounds asked for are those on the smallest box around all of a query's; the verdict is the search's.

    ``names`` are the queries' paths in their archive, empty for those that were no archive's.
    """

    queries: Sequence[Query]
    names: Sequence[str]
    eps: float | None = None
    has_labels: bool = False

    @property
    def count(self) -> int:
        return len(self.queries)

    def name(self, instance: int) -> str | None:
        return self.names[instance] or None

    def query(self, instance: int) -> Query:
        return self.queries[instance]

    def ask(self, instances: Sequence[int], like: Tensor) -> Question:
        lower, upper = (
            torch.stack(ends).to(like.device)
            for ends in zip(*(_around(self.queries[instance]) for instance in instances), strict=True)
        )
        box = Interval.enclosing(lower, upper, like.dtype)
        rows = like.new_zeros(len(instances), 0, self.queries[0].outputs)
        return Question(instances, box, rows, rows[:, :, 0], box.centre)


def _around(query: Query) -> tuple[Tensor, Tensor]:
    """Ends of the smallest box around all of the query's, float64."""
    boxes = {(id(case.lower), id(case.upper)): (case.lower, case.upper) for case in query.cases}
    ends = torch.tensor(list(boxes.values()), dtype=torch.float64)
    return ends[:, 0].amin(dim=0), ends[:, 1].amax(dim=0)


def queried(spec: VnnlibProperty, features: int, outputs: int, layout: DataLayout | None) -> Queried:
    """:class:`PropertyError` where a file cannot be read or does not fit the model."""
    if layout is None:
        raise PropertyError("property.vnnlib needs the folder of uploaded files")
    found = [each for path, file in spec.files for each in _read(path, layout, file, (features, outputs))]
    return Queried([query for _, query in found], [name for name, _ in found])


def _read(path: str, layout: DataLayout, file: str, expected: tuple[int, int]) -> Iterator[tuple[str, Query]]:
    where = path
    try:
        for source in sources(layout.file(file)):
            where = f"{path}: {source.name}" if source.name else path
            query = parse(source.text)
            if (query.inputs, query.outputs) != expected:
                raise PropertyError(
                    f"{where} has {query.inputs} inputs and {query.outputs} outputs, "
                    f"the model has {expected[0]} and {expected[1]}"
                )
            if not query.cases:
                raise PropertyError(f"{where}: no input satisfies its bounds on inputs, so there is nothing to verify")
            yield source.name, query
    except (OSError, VnnlibError) as error:
        raise PropertyError(f"{where}: {error}") from error
