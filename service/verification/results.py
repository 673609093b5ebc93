"""Keeps the rows of results: decided instances for a resume, then the table and its statistics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pyarrow
import torch
from pyarrow import parquet
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.network import Network
from service.jobs.events import ROW_VERDICTS, BoundsRow
from service.jobs.files import atomic_draft
from service.jobs.runtime import plain_tables
from service.parallel.collectives import reduce_from_group
from service.parallel.mesh import Mesh
from service.verification.certify import Outcome
from service.verification.counterexamples import CounterexampleOutputs
from service.verification.properties import Property
from service.verification.verdict import Verdict

_DECIDED_BY = {Verdict.VERIFIED: "bounds", Verdict.FALSIFIED: "witness", Verdict.UNKNOWN: None}


def rows_of(
    outcome: Outcome, method: str, asked: Property, predictions: Sequence[int] | None = None
) -> list[BoundsRow]:
    """Return a row per instance; bounds that are not finite are infinite, and a margin is ``None`` then.

    ``predictions`` are the model's classes of labelled samples.
    """
    lower, upper, margins = (tensor.tolist() for tensor in (outcome.output.lower, outcome.output.upper, outcome.margin))
    witnesses = outcome.batch.witnesses
    return [
        BoundsRow(
            instance=instance,
            name=asked.name(instance),
            label=asked.label(instance),
            prediction=None if predictions is None else predictions[index],
            verdict=verdict.value,
            lower=[value if isfinite(value) else "-Infinity" for value in lower[index]],
            upper=[value if isfinite(value) else "Infinity" for value in upper[index]],
            margin=_finite(margins[index]),
            method=method,
            decided_by=_DECIDED_BY[verdict],
            reason=_why_open(asked, instance, _overflow(outcome, index)) if verdict is Verdict.UNKNOWN else None,
            seconds=outcome.seconds,
            domains=1,
            counterexample=witnesses[index].double().tolist() if verdict is Verdict.FALSIFIED else None,
        )
        for index, (instance, verdict) in enumerate(zip(outcome.batch.instances, outcome.verdicts, strict=True))
    ]


def _why_open(asked: Property, instance: int, overflow: str) -> str:
    reason = "only bounds were asked for" if asked.query(instance) is None else "the bounds do not decide it"
    return reason + overflow


def _overflow(outcome: Outcome, index: int) -> str:
    """Return the first operator where the bounds of an instance are not finite, if those of its outputs are not."""
    ends = outcome.output.lower[index], outcome.output.upper[index]
    if all(bool(end.isfinite().all()) for end in ends):
        return ""
    for name, bounds in outcome.inputs.items():
        if not all(bool(end[index].isfinite().all()) for each in bounds for end in (each.lower, each.upper)):
            return f"; bounds are infinite from what {name!r} reads on"
    last = next(reversed(outcome.inputs), None)
    return f"; bounds are infinite from {last!r} on" if last is not None else "; the sums of its bounds overflow"


def refused_row(instance: int, method: str, asked: Property, reason: str) -> BoundsRow:
    """Return the row of an instance that could not be bounded."""
    return BoundsRow(
        instance=instance,
        name=asked.name(instance),
        label=asked.label(instance),
        verdict=Verdict.UNKNOWN.value,
        lower=[],
        upper=[],
        margin=None,
        method=method,
        reason=reason,
        seconds=0.0,
        domains=0,
        counterexample=None,
    )


def leave_undecided(row: BoundsRow, reason: str) -> BoundsRow:
    return replace(row, verdict=Verdict.UNKNOWN.value, decided_by=None, reason=reason)


def at_counterexample(row: BoundsRow, outputs: CounterexampleOutputs) -> BoundsRow:
    """Return the row with the model's outputs at its counterexample; outputs that are not finite are ``None``."""
    return replace(
        row,
        counterexample_outputs=[_finite(value) for value in outputs.precise],
        onnxruntime_outputs=None if outputs.runtime is None else [_finite(value) for value in outputs.runtime],
    )


def around(row: BoundsRow, sample: Tensor, outputs: CounterexampleOutputs) -> BoundsRow:
    """Return the row with the sample ``(features,)`` around which its counterexample was found; of one with very many
    features only with its outputs.
    """
    shown = sample.tolist() if len(sample) <= _MOST_SHOWN else None
    return replace(row, sample=shown, sample_outputs=[_finite(value) for value in outputs.precise])


_MOST_SHOWN = 80_000
"""Features of a sample beside its counterexample; with more, the row would be too long for an event and be left out."""


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


@dataclass(frozen=True)
class NonlinearLayer:
    """A non-linear node of a whole network; ``neurons`` counts those of all ranks."""

    name: str
    operator: str
    neurons: int


class _LayerSums(NamedTuple):
    """Sums over the entries of one non-linear node's inputs, for one instance; fields are columns of
    :func:`layer_sums`."""

    width: float
    """The sum of the widths of their bounds."""
    unstable: float
    """The number of entries whose relaxation would gain from tighter bounds."""
    entries: float
    """The number of all entries."""


_LAYER_SUMS = len(_LayerSums._fields)


def layer_sums(network: Network, outcome: Outcome, mesh: Mesh) -> Tensor:
    """Return the columns of :class:`_LayerSums` for each instance and non-linear node, float64 ``(batch, nodes, 3)``.
    Summed over the ranks that divide a value; each calls it.
    """
    nodes, batch = network.nonlinear, len(outcome.verdicts)
    sums = outcome.margin.new_zeros(batch, len(nodes), _LAYER_SUMS, dtype=torch.float64)
    for index, node in enumerate(nodes):
        bounds = outcome.inputs[node.name]
        undecided = network.operator_of(node).unstable_on(node, bounds)
        for each, open_ in zip(bounds, undecided, strict=True):
            count = sums.new_full((batch,), each.lower[0].numel())
            sums[:, index] += torch.stack([_per_instance(each.width), _per_instance(open_), count], dim=1)
    divided = torch.tensor([network.is_own(node.inputs[0]) for node in nodes], dtype=torch.bool, device=sums.device)
    if nodes and mesh.tp.size > 1:
        sums = torch.where(divided[:, None], reduce_from_group(sums, mesh.tp.group), sums)
    return sums


def _per_instance(entries: Tensor) -> Tensor:
    return by_instance(entries).double().sum(dim=1)


def layer_means(layers: Sequence[NonlinearLayer], entries: Sequence[DecidedRow]) -> list[dict[str, Any]]:
    """Return an entry for each layer; means are per instance."""
    if not layers:
        return []
    totals = torch.zeros(len(layers), _LAYER_SUMS, dtype=torch.float64)
    for entry in (each for each in entries if each.layers):  # the others could not be bounded
        totals += torch.tensor(entry.layers, dtype=torch.float64)
    return [_layer_entry(layer, _LayerSums(*sums)) for layer, sums in zip(layers, totals.tolist(), strict=True)]


def _layer_entry(layer: NonlinearLayer, total: _LayerSums) -> dict[str, Any]:
    return {
        "layer": layer.name,
        "operator": layer.operator,
        "neurons": layer.neurons,
        "mean_width": _ratio(total.width, total.entries),
        "mean_unstable": _ratio(total.unstable * layer.neurons, total.entries),
    }


def _ratio(total: float, count: float) -> float | None:
    return _finite(total / count) if count else None


def summary(rows: Sequence[BoundsRow], has_labels: bool, eps: float | None) -> Mapping[str, Any]:
    """Return verdicts, accuracies (fractions of all instances), mean width of the output bounds, seconds of work."""
    verdicts = {name: sum(row.verdict == name for row in rows) for name in ROW_VERDICTS}
    widths = list(_widths(rows))
    finite = [width for width in widths if width is not None]
    bounded = len(finite) == len(widths) and bool(widths)
    count = len(rows)
    # A sample that a search falsified was classified correctly; only witnesses, the samples themselves, were
    # misclassified.
    wrong = sum(row.decided_by == "witness" for row in rows)
    accuracies = {
        "clean_accuracy": (count - wrong) / count if count else None,
        "certified_accuracy": verdicts["verified"] / count if count else None,
        "eps": eps,
    }
    return {
        "verdicts": verdicts,
        "mean_width": sum(finite) / len(finite) if bounded else None,
        "seconds": sum(row.seconds for row in rows),
        "instances": count,
        **(accuracies if has_labels else {}),
    }


def _widths(rows: Iterable[BoundsRow]) -> Iterable[float | None]:
    for row in rows:
        for low, high in zip(row.lower, row.upper, strict=True):
            yield high - low if isinstance(low, float) and isinstance(high, float) else None


PARQUET = "application/vnd.apache.parquet"
_FILE = "bounds.parquet"
ENDS = ("lower", "upper")
_COLUMNS = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}


def _column(annotation: Any) -> pyarrow.DataType:
    """Return the type of the column for a field with this annotation; every column may hold null."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType}:
        kinds = [argument for argument in arguments if argument is not NoneType]
        return _column(float if float in kinds else kinds[0])
    if origin is Literal:
        return _column(type(arguments[0]))
    return pyarrow.list_(_column(arguments[0])) if origin is list else _COLUMNS[annotation]


SCHEMA = pyarrow.schema([(name, _column(annotation)) for name, annotation in get_type_hints(BoundsRow).items()])


def write_rows(rows: Sequence[BoundsRow], folder: Path) -> Path:
    """Write the rows to ``folder/bounds.parquet``, which appears only when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / _FILE
    with atomic_draft(target) as draft:
        parquet.write_table(plain_tables.table([_with_numbers(row) for row in rows], SCHEMA), draft)
    return target


def _with_numbers(row: BoundsRow) -> dict[str, Any]:
    """Return the fields of a row, with infinite bounds as numbers."""
    ends = {side: [float(end) if isinstance(end, str) else end for end in getattr(row, side)] for side in ENDS}
    return row.as_dict() | ends


@dataclass(frozen=True)
class DecidedRow:
    """A row, and for each non-linear node the sums that :func:`~service.verification.results.layer_means` adds up."""

    row: BoundsRow
    layers: list[list[float]]
    overflows: bool = False
    """Whether some bounds of the instance's whole box are infinite; not kept for a resume."""

    @property
    def instance(self) -> int:
        return self.row.instance


class ResumeLog:
    """The rows of a job in ``folder``, written by attempt ``attempt`` for one data-parallel rank."""

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._own = folder / _name(attempt, rank)

    def earlier(self) -> dict[int, DecidedRow]:
        """Return the decisions of earlier attempts on all ranks, by instance."""
        return self._read(range(self._attempt))

    def everything(self) -> dict[int, DecidedRow]:
        """Return the decisions of all attempts up to this one, by instance; other ranks must have written theirs."""
        return self._read(range(self._attempt + 1))

    def add(self, entries: list[DecidedRow]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"row": entry.row.as_dict(), "layers": entry.layers}) + "\n" for entry in entries]
        with self._own.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _read(self, attempts: range) -> dict[int, DecidedRow]:
        files = (path for attempt in attempts for path in sorted(self._folder.glob(_name(attempt, "*"))))
        found = (entry for path in files for entry in _entries(path))
        return {entry.instance: entry for entry in found}


def _name(attempt: int, rank: int | str) -> str:
    return f"rows-{attempt}-{rank}.jsonl"


def _entries(path: Path) -> Iterator[DecidedRow]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return  # the attempt died while it wrote
            try:
                held = json.loads(line)
                entry = DecidedRow(BoundsRow(**held["row"]), held["layers"])
            except (ValueError, KeyError, TypeError):
                return  # a line cut by a loss of power; its instances are decided again
            yield entry
