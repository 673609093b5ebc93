"""Adds to the row of a falsified instance what people look at: the outputs at its counterexample, and the sample."""

from __future__ import annotations

import torch

from service.jobs.events import BoundsRow
from service.verification import results
from service.verification.counterexamples import CounterexampleChecker
from service.verification.task import Task


def add_outputs(row: BoundsRow, task: Task, checker: CounterexampleChecker) -> BoundsRow:
    """Return the row with the outputs at its counterexample, if any, and with the sample around which it was found; all
    ranks that bound the instance call it.
    """
    if row.counterexample is None:
        return row
    x = torch.tensor(row.counterexample, dtype=torch.float64, device=task.device)
    row = results.at_counterexample(row, checker.outputs(x))
    if row.label is None or row.decided_by == "witness":  # which is the sample itself
        return row
    (sample,) = task.asked.batch([row.instance], x).witnesses
    return results.around(row, sample, checker.outputs(sample))
