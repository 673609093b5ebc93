"""Words what a verification says in its job's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from service.jobs.bounds_row import BoundsRow
from service.verification.load import LoadedTasks
from service.verification.task import Task


def begun(loaded: LoadedTasks) -> Iterator[str]:
    """Yield the instances, the method, the layout, the network, and notes on its analysis."""
    first = loaded.assignment
    count, parallel = first.asked.count, first.spec.parallel
    instances = f"{count:,} instance{'s' * (count != 1)}"
    yield f"{instances} by {first.method_label} on {parallel.arithmetic} rank{'s' * (parallel.world_size > 1)}"
    yield from dict.fromkeys(line for task in loaded.tasks for line in (_network(task), *task.notes))
    yield from dict.fromkeys(task.precision for task in loaded.tasks if task.precision is not None)


def _network(task: Task) -> str:
    inputs, budget = prod(task.engine.network.graph.input.shape), task.spec.budget
    neurons, layers = sum(layer.neurons for layer in task.layers), len(task.layers)
    seconds = "" if budget.seconds is None else f", {budget.seconds:g} s for an instance"
    return (
        f"network: {inputs:,} inputs, {neurons:,} nonlinear neurons in {layers} layer{'s' * (layers != 1)}; "
        f"batches of {budget.batch}{seconds}"
    )


def searched(row: BoundsRow) -> str:
    """Return how the search for one instance ended."""
    how = f" by {row.decided_by}" if row.decided_by else f", {row.reason}" if row.reason else ""
    domains = f"{row.domains:,} domain{'s' * (row.domains != 1)}"
    return f"instance {row.instance}: {row.verdict}{how} ({domains}, {row.seconds:.1f} s)"


def ended(verdicts: Mapping[str, int], seconds: float) -> str:
    """Return what the job found."""
    found = ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.items() if count)
    return f"{found or 'no instances'} after {seconds:.1f} s"
