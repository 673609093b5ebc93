"""Rows and statistics of a run: on one rank, then over all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor

from service.bounds.network import Network
from service.parallel.collectives import gather_from_group, reduce_from_group
from service.parallel.mesh import Mesh
from service.verification.certify import Outcome, Verdict

Row = dict[str, Any]
VERDICTS = (*(each.value for each in Verdict), "timeout")
_ABSENT = -1.0


def rows_of(outcome: Outcome, method: str) -> list[Row]:
    """A row per instance, as the interface has it; numbers that are not finite are ``None``."""
    lower, upper, margins = (tensor.tolist() for tensor in (outcome.output.lower, outcome.output.upper, outcome.margin))
    witnesses = outcome.question.witnesses.double().tolist()
    return [
        {
            "instance": instance,
            "verdict": verdict.value,
            "lower": [_finite(value) for value in lower[index]],
            "upper": [_finite(value) for value in upper[index]],
            "margin": _finite(margins[index]),
            "method": method,
            "seconds": outcome.seconds,
            "domains": 1,
            "counterexample": witnesses[index] if verdict is Verdict.FALSIFIED else None,
        }
        for index, (instance, verdict) in enumerate(zip(outcome.question.instances, outcome.verdicts, strict=True))
    ]


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


@dataclass(eq=False)
class LayerTally:
    """Sums over instances for each non-linear node: width of its input's bounds, improvable entries, all entries."""

    network: Network
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(len(self.network.nonlinear), 3, dtype=torch.float64)

    def add(self, outcome: Outcome) -> None:
        for index, node in enumerate(self.network.nonlinear):
            bounds = outcome.inputs[node.name]
            undecided = self.network.rule_of(node).improvable_on(node, bounds)
            for each, open_ in zip(bounds, undecided, strict=True):
                entries = [float(each.width.double().sum()), float(open_.sum()), each.width.numel()]
                self.sums[index] += torch.tensor(entries, dtype=torch.float64)

    def totals(self, mesh: Mesh, device: torch.device) -> list[dict[str, Any]]:
        """Over all ranks; every rank calls it. Means are per instance."""
        nodes = self.network.nonlinear
        if not nodes:
            return []
        own = [self.network.is_own(node.inputs[0]) for node in nodes]
        sums = self.sums.to(device)
        over_shards = reduce_from_group(sums, mesh.tp.group)
        sums = torch.where(torch.tensor(own, device=device).unsqueeze(1), over_shards, sums)
        sums = reduce_from_group(sums, mesh.dp.group)
        sizes = [node.size * (mesh.tp.size if divided else 1) for node, divided in zip(nodes, own, strict=True)]
        return [
            {
                "layer": node.name,
                "operator": node.operator,
                "neurons": size,
                "mean_width": _ratio(width, entries),
                "mean_unstable": _ratio(unstable * size, entries),
            }
            for node, size, (width, unstable, entries) in zip(nodes, sizes, sums.tolist(), strict=True)
        ]


def _ratio(total: float, count: float) -> float | None:
    return _finite(total / count) if count else None


def gather_rows(rows: Iterable[Row], total: int, method: str, mesh: Mesh, device: torch.device) -> list[Row]:
    """All instances' rows, in order of instance, on every rank; every rank calls it with those of its dp rank.

    They travel as one float64 matrix, so that nothing has to be unpickled.
    """
    own = list(rows)
    outputs = max((len(row["lower"]) for row in own), default=0)
    features = max((len(row["counterexample"] or ()) for row in own), default=0)
    widths = gather_from_group(torch.tensor([[outputs, features]], device=device), 0, mesh.dp.group, mesh.dp.size)
    outputs, features = widths.amax(dim=0).tolist()
    share = ceil(total / mesh.dp.size)
    table = torch.full((share, 6 + 2 * outputs + features), _ABSENT, dtype=torch.float64, device=device)
    for index, row in enumerate(own):
        table[index] = torch.tensor(_encode(row, features), dtype=torch.float64)
    everyone = gather_from_group(table, 0, mesh.dp.group, mesh.dp.size)
    decoded = [_decode(values, outputs, method) for values in everyone.tolist() if values[0] != _ABSENT]
    return sorted(decoded, key=lambda row: int(row["instance"]))


def _encode(row: Row, features: int) -> list[float]:
    verdict = VERDICTS.index(row["verdict"])
    found = row["counterexample"]
    numbers = [row["instance"], verdict, row["margin"], row["seconds"], row["domains"], *row["lower"]]
    numbers += [*row["upper"], found is not None, *(found if found is not None else [0.0] * features)]
    return [float("nan") if number is None else float(number) for number in numbers]


def _decode(values: list[float], outputs: int, method: str) -> Row:
    numbers = [_finite(value) for value in values]
    return {
        "instance": int(values[0]),
        "verdict": VERDICTS[int(values[1])],
        "lower": numbers[5 : 5 + outputs],
        "upper": numbers[5 + outputs : 5 + 2 * outputs],
        "margin": numbers[2],
        "method": method,
        "seconds": values[3],
        "domains": int(values[4]),
        "counterexample": values[6 + 2 * outputs :] if values[5 + 2 * outputs] else None,
    }


def summary(rows: list[Row], has_labels: bool, eps: float | None) -> Mapping[str, Any]:
    """Verdicts, accuracies (fractions of all instances), mean width of the output bounds, seconds of work."""
    verdicts = {name: sum(row["verdict"] == name for row in rows) for name in VERDICTS}
    widths = [
        high - low if low is not None and high is not None else None
        for row in rows
        for low, high in zip(row["lower"], row["upper"], strict=True)
    ]
    finite = [width for width in widths if width is not None]
    bounded = len(finite) == len(widths) and bool(widths)
    count = len(rows)
    accuracies = {
        "clean_accuracy": (count - verdicts["falsified"]) / count if count else None,
        "certified_accuracy": verdicts["verified"] / count if count else None,
        "eps": eps,
    }
    return {
        "verdicts": verdicts,
        "mean_width": sum(finite) / len(finite) if bounded else None,
        "seconds": sum(row["seconds"] for row in rows),
        "instances": count,
        **(accuracies if has_labels else {}),
    }
