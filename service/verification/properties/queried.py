"""A VNN-LIB query as a property of one instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.jobs.layout import DataLayout
from service.jobs.spec.verify import VnnlibProperty
from service.verification.properties.base import PropertyError, Question
from service.verification.properties.vnnlib import Query, VnnlibError, parse


@dataclass(frozen=True, eq=False)
class Queried:
    """The bounds asked for are those on the smallest box around all of the query's; the verdict is the search's."""

    query: Query
    count: int = 1
    eps: float | None = None
    has_labels: bool = False

    def ask(self, instances: Sequence[int], like: Tensor) -> Question:
        ends = [[each.lower, each.upper] for each in self.query.cases]
        exact = torch.tensor(ends, dtype=torch.float64, device=like.device)
        lower, upper = exact[:, 0].amin(dim=0, keepdim=True), exact[:, 1].amax(dim=0, keepdim=True)
        box = Interval.enclosing(lower, upper, like.dtype)
        rows = like.new_zeros(1, 0, self.query.outputs)
        return Question(instances, box, rows, rows[:, :, 0], box.centre)


def queried(spec: VnnlibProperty, features: int, outputs: int, layout: DataLayout | None) -> Queried:
    """:class:`PropertyError` where the file cannot be read or does not fit the model."""
    if layout is None:
        raise PropertyError(f"property.vnnlib: {spec.vnnlib} needs the folder of uploaded files")
    try:
        query = parse(layout.file(spec.vnnlib).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, VnnlibError) as error:
        raise PropertyError(f"property.vnnlib: {error}") from error
    if (query.inputs, query.outputs) != (features, outputs):
        raise PropertyError(
            f"property.vnnlib has {query.inputs} inputs and {query.outputs} outputs, "
            f"the model has {features} and {outputs}"
        )
    if not query.cases:
        raise PropertyError("property.vnnlib: no input satisfies its bounds on inputs, so there is nothing to verify")
    return Queried(query)
