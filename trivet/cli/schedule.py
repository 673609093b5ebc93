"""Draws a pipeline's schedule as text: a row per rank, a letter and a micro-batch per computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from trivet.cli import specs
from trivet.cli.context import JsonFlag, add_commands, client, out, print_json, refuse

if TYPE_CHECKING:
    from service.jobs.submission.plan import Plan, PlannedCell, PlannedRank

_LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}
_STYLES = {"forward": "blue", "backward": "yellow", "backward_input": "red", "backward_weight": "magenta"}
_SUFFIXES = frozenset({".yaml", ".yml", ".json"})
_IDLE = "·"


def register(app: typer.Typer) -> None:
    add_commands(app, schedule)


def schedule(
    source: Annotated[str, typer.Argument(metavar="ID|SPEC", help="a job's id, or a spec file; - for standard input")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="change a spec's value")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the predicted schedule of one step of a pipeline: which rank computes what, and when. A spec file needs no
    service.
    """
    if source == "-" or Path(source).suffix in _SUFFIXES or Path(source).is_file():
        found = _of_spec(source, changes or ())
    else:
        with client() as service:
            found = service.schedule(source)
    if as_json:
        print_json(asdict(found))
        return
    for line in lines(found, out.width if out.is_terminal else None):
        out.print(line)


def lines(plan: Plan, width: int | None = None) -> Iterator[Text]:
    """Yield the plan's costs, then its rows, cut into blocks of columns if they are wider than ``width``."""
    yield Text(
        f"{plan.schedule}: {plan.ranks} ranks, {plan.stages} stages, {plan.micro_batches} micro-batches; "
        f"predicted bubble {plan.bubble:.1%}"
    )
    unit = min(cell.end - cell.start for row in plan.rows for cell in row.cells)
    columns = len(str(plan.micro_batches - 1)) + 2
    rows = [_row(row, plan, columns / unit) for row in plan.rows]
    labels = [f"rank {row.rank}  " for row in plan.rows]
    room = max(width - max(map(len, labels)), columns) if width else max(map(len, rows))
    for start in range(0, max(map(len, rows)), room):
        yield Text()
        for label, row in zip(labels, rows, strict=True):
            yield Text(label.ljust(max(map(len, labels))), style="bold") + row[start : start + room]
    yield Text()
    yield from _legend(plan)


def _row(row: PlannedRank, plan: Plan, scale: float) -> Text:
    text = Text()
    for cell in row.cells:
        start, end = round(cell.start * scale), round(cell.end * scale)
        text.append(_IDLE * (start - len(text)), style="dim")
        text.append(_label(cell, plan).ljust(end - start), style=_STYLES.get(cell.op, ""))
    return text


def _label(cell: PlannedCell, plan: Plan) -> str:
    letter = _LETTERS.get(cell.op, "?")
    return f"{letter if cell.stage // plan.ranks % 2 == 0 else letter.lower()}{cell.micro_batch}"


def _legend(plan: Plan) -> Iterator[Text]:
    ops = {cell.op for row in plan.rows for cell in row.cells}
    named = ", ".join(f"{letter} {op.replace('_', ' ')}" for op, letter in _LETTERS.items() if op in ops)
    every_other = "; small letters: a rank's every other stage" if plan.stages > plan.ranks else ""
    yield Text(f"{named} of a micro-batch{every_other}")
    for what, values in (
        ("activations kept at most", [row.peak_activations for row in plan.rows]),
        ("receive buffers at most", [row.peak_buffers for row in plan.rows]),
    ):
        yield Text(f"{what}, by rank: {', '.join(map(str, values))}")


def _of_spec(source: str, changes: Sequence[str]) -> Plan:
    # These import every spec; other commands do not need them.
    from service.jobs.checks.fit import check_pipeline  # noqa: PLC0415
    from service.jobs.kinds.registry import spec_adapter  # noqa: PLC0415
    from service.jobs.spec.train import TrainSpec  # noqa: PLC0415
    from service.jobs.submission.plan import plan  # noqa: PLC0415

    spec = spec_adapter.validate_python(specs.load(source, changes))
    found: Plan | None = None
    if isinstance(spec, TrainSpec):
        if problems := list(check_pipeline(spec, spec.micro_batches)):
            refuse("\n".join(f"{problem.path}: {problem.message}" for problem in problems))
        found = plan(spec)
    if found is None:
        refuse(f"{source} has no pipeline; expected a train spec with parallel.pp above 1")
    return found
