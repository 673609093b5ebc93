"""Attacks *verified* rows from outside before they are published: no bound and no graph of ours takes part.

The user's own file runs in onnxruntime at inputs of the instance: centres, ends, corners where the gradient points to a
violation, random corners and inputs between. A violation there is an error of Trivet, which is reported with everything
that shows it; an output that is not a number (NaN) leaves the instance undecided.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from math import inf

import numpy as np
import torch
from torch import Tensor

from service.bounds.finite import may_be_undefined
from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.formats.vnnlib import Query
from service.jobs.events import BoundsRow
from service.jobs.runtime import RunContext
from service.verification.bab.specification import CPU, Specification, specifications
from service.verification.defined import open_tests, undefined_in, undefined_within
from service.verification.load.model_file import within
from service.verification.results import leave_undecided
from service.verification.task import Task
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN, Verdict

LEAST, SHARE = 3, 0.1
"""The number of inputs that are always run, and the share of an instance's seconds that all of them may take, or what
only a note depends on; whether a proved instance has a value everywhere may take what its proof left of them.
"""
GUIDED = 16
"""Most rows of outputs whose gradients choose corners."""
OF_HALVES = 1e-2
"""A share of the outputs: what onnxruntime's rounding to half precision may change."""
LARGE = 1e300
"""What counts as an infinite output: above every threshold that matters."""
MOST_SECONDS = 60.0
"""The seconds of an instance that counts as without a limit."""


class WrongBoundsError(RuntimeError):
    """Bounds of Trivet proved what a file's own outputs refute: an error of Trivet's."""


@dataclass(eq=False)
class OutsideAttack:
    """Checks the verified rows of one task; all ranks that bound them call it."""

    task: Task
    context: RunContext

    def settled(self, row: BoundsRow, limit: float = inf, *, overflows: bool = False) -> BoundsRow:
        """Return the row, undecided where the model may have no value, and with a note if its bounds may not hold
        there; ``limit`` are the seconds of the instance, and ``overflows`` says that some bounds of its box are
        infinite. Raises :class:`WrongBoundsError` where its file refutes it.
        """
        query = self.task.asked.query(row.instance)
        started, most = time.monotonic(), min(limit, MOST_SECONDS)
        if row.verdict != Verdict.VERIFIED.value and row.lower:
            row = self._note_undefined(row, overflows, started + SHARE * most)
        if row.verdict in {Verdict.UNKNOWN.value, "timeout"}:
            return replace(row, reason=f"{row.reason or ''}{open_tests(self.task, row.instance)}" or None)
        if row.verdict != Verdict.VERIFIED.value or query is None:
            return row
        found = self._settle_row(
            row, query, started + SHARE * most, overflows, started + max(SHARE * most, most - row.seconds)
        )
        return replace(found, seconds=row.seconds + time.monotonic() - started)

    def _settle_row(
        self, row: BoundsRow, query: Query, deadline: float, overflows: bool, defined_by: float
    ) -> BoundsRow:
        specified = specifications(query, CPU)
        if (
            self.task.engine.is_alone
            and (overflows or self._may_be_undefined)
            and (node := undefined_in(self.task, specified, defined_by)) is not None
        ):
            return leave_undecided(
                row, f"{node} may have no value in the box, or overflow: the output may be no number (NaN)"
            )
        if self.task.outside is None or not self.task.spec.budget.replays:
            return row
        for count, (specification, x) in enumerate(self._inputs(specified, row.instance, deadline)):
            if count >= LEAST and self.task.anywhere(time.monotonic() > deadline):
                break
            try:
                outputs = torch.from_numpy(self.task.outside.run(x.numpy()))
            except UnsupportedModelError as error:
                return leave_undecided(row, f"at an input of the box, {error}")
            if bool(outputs.isnan().any()):
                return leave_undecided(
                    row, f"onnxruntime gives no number (NaN) at an input of the box, {_show_point(x)}"
                )
            if self._is_violated(specification, x.double(), outputs):
                raise self._report_wrong(row, x, outputs)
        return row

    def _note_undefined(self, row: BoundsRow, overflows: bool, deadline: float) -> BoundsRow:
        """Return the row with a note where a value that its output depends on may be no number: what reads it may be
        a number all the same, and outside of the bounds.
        """
        if not self.task.engine.is_alone or not (overflows or self._may_be_undefined):
            return row
        box = self.task.asked.batch([row.instance], self.task.like).box
        if (node := undefined_within(self.task, Interval(box.lower, box.upper), deadline)) is None:
            return row
        note = f"bounds hold where every value is a number: {node} may have none in the box, or overflow"
        return replace(row, note="; ".join(each for each in (row.note, note) if each))

    def _is_violated(self, specification: Specification, x: Tensor, outputs: Tensor) -> bool:
        """Return whether outputs violate the property by more than rounding in another order changes them."""
        known = self.task.own_type
        relative = OF_HALVES if self.task.precision else RELATIVE_MARGIN[known]
        outputs = outputs.nan_to_num(posinf=LARGE, neginf=-LARGE)
        size = specification.rows.abs() @ torch.where(outputs.abs() < LARGE, outputs.abs(), 0)
        allowed = ABSOLUTE_MARGIN[known] + relative * (size + specification.thresholds.abs())
        excess = specification.excess(outputs[None], x[None])
        return bool(specification.distance_to_nearest(excess + allowed) <= 0)

    @cached_property
    def _type_of_inputs(self) -> torch.dtype:
        runtime = self.task.runtime
        return torch.float32 if runtime is None else torch.from_numpy(np.empty(0, runtime.dtype)).dtype

    @cached_property
    def _may_be_undefined(self) -> bool:
        return may_be_undefined(self.task.engine.network.graph)

    def _inputs(
        self, every: Sequence[Specification], instance: int, deadline: float
    ) -> Iterator[tuple[Specification, Tensor]]:
        """Yield inputs in the file's own type, each with the part of the query that it is about."""
        count = self.task.spec.budget.replays
        visited = list(self._visited_inputs(every, instance, count // 2))
        yield from visited
        count -= len(visited)
        chosen = every[:: max(1, -(-len(every) // count))]
        generator = torch.Generator().manual_seed(instance)
        share = max(1, count // len(chosen))
        corners = [self._guided_inputs(one, share - 1, deadline) for one in chosen]
        each = [_draw_inputs(*pair, share, generator) for pair in zip(chosen, corners, strict=True)]
        for place in range(max(len(drawn) for drawn in each)):  # the first of each box, then the second
            for one, drawn in zip(chosen, each, strict=True):
                x = None if place >= len(drawn) else _in_type(one, drawn[place], self._type_of_inputs)
                if x is not None:
                    yield one, x

    def _visited_inputs(
        self, every: Sequence[Specification], instance: int, most: int
    ) -> Iterator[tuple[Specification, Tensor]]:
        """Yield inputs at which the instance's search came nearest to a counterexample, if this rank is alone: ranks
        that search together have different ones.
        """
        points = self.task.visited.pop(instance, None)
        if points is None or not self.task.is_alone:
            return
        left = points[:most]
        for one in every:
            is_inside = ((left >= one.first) & (left <= one.last)).all(dim=1)
            for x in left[is_inside]:
                if (found := _in_type(one, x, self._type_of_inputs)) is not None:
                    yield one, found
            left = left[~is_inside]

    def _guided_inputs(self, specification: Specification, most: int, deadline: float) -> Tensor:
        """Return the centre of a box, and the corners to which gradients point, one for each row of outputs; ``most``
        of them, and none where other ranks have a part of the model.
        """
        lower, upper = specification.first, specification.last
        if not self.task.engine.is_alone or most < 1:
            return lower.new_zeros(0, len(lower))
        like = next((each for each in self.task.module.state_dict().values() if each.is_floating_point()), lower)
        x = (lower / 2 + upper / 2).to(like)[None].requires_grad_()
        corners = [lower / 2 + upper / 2]
        with torch.enable_grad():
            outputs = self.task.module(x)[0]
            for row in specification.rows[: min(GUIDED, most - 1)]:
                total = (row.to(outputs) * outputs).sum()
                if not total.requires_grad or time.monotonic() > deadline:
                    break
                (slope,) = torch.autograd.grad(total, x, retain_graph=True, allow_unused=True, materialize_grads=True)
                corners.append(torch.where(slope[0].to(lower) > 0, lower, upper))
        return torch.stack(corners)

    def _report_wrong(self, row: BoundsRow, x: Tensor, outputs: Tensor) -> WrongBoundsError:
        """Return the error that takes the row's place, after an artifact that shows it."""
        name = f"error-of-instance-{row.instance}.zip"
        if self.task.leads:
            folder = self.context.paths.artifacts
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(self._bundle(row, x, outputs))
            self.context.report.artifact(folder / name, "application/zip")
        return WrongBoundsError(
            f"instance {row.instance} was proved, and its own file in onnxruntime violates it, which is an error of "
            f"Trivet: please report its artifact {name}"
        )

    def _bundle(self, row: BoundsRow, x: Tensor, outputs: Tensor) -> bytes:
        import onnxruntime  # noqa: PLC0415 - as in the loader

        versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__, "numpy": np.__version__}
        told = {"row": row.as_dict(), "input": x.tolist(), "outputs": outputs.tolist(), "versions": versions}
        told |= {"spec": self.task.spec.model_dump(mode="json"), "query": repr(self.task.asked.query(row.instance))}
        content = BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as bundle:
            bundle.writestr("report.json", json.dumps(told, indent=1))
            if self.task.outside is not None:
                bundle.writestr("model.onnx", self.task.outside.content())
        return content.getvalue()


def _draw_inputs(specification: Specification, guided: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return so many inputs of a box: the ``guided`` ones, its ends, random corners and inputs between."""
    others = within(specification.first[None], specification.last[None], max(3, count - len(guided)), generator)
    return specification.nearest(torch.cat([guided, others])[:count])


def _in_type(specification: Specification, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the number of a type that is nearest to each entry of an input and in the exact set, if there is one."""
    found = x.to(dtype)
    for _ in range(0 if dtype == torch.float16 else 2):  # torch knows no neighbours of halves
        low, high = found.double() < specification.first, found.double() > specification.last
        up, down = (torch.nextafter(found, torch.full_like(found, end)) for end in (inf, -inf))
        found = torch.where(low, up, torch.where(high, down, found))
    exact = found.double()
    is_inside = bool(((exact >= specification.first) & (exact <= specification.last)).all())
    has_one = not bool((specification.missed > 0).any())
    if specification.ball is not None and not specification.ball.contains(exact.tolist()):
        return None
    return found if is_inside and has_one else None


def _show_point(x: Tensor) -> str:
    return f"({', '.join(f'{entry:.9g}' for entry in x[:6].tolist())}{', …' if len(x) > 6 else ''})"
