"""Shows a job's output, metrics, bounds and artifacts."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.table import Table

from service.jobs.events import Level, LineFilter
from service.jobs.spec.common import TERMINAL
from service.jobs.text import documents
from trivet import tables
from trivet.cli.context import (
    CsvFlag,
    JobArgument,
    JsonFlag,
    add_commands,
    client,
    err,
    out,
    print_csv,
    print_json,
    print_list,
    refuse,
    table,
)

if TYPE_CHECKING:
    from service.jobs.records import Artifact
    from trivet.client import Client

_PLAINLY = 0.05
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_FEWEST_POINTS = 10
_STREAMS = ("stdout", "stderr", "service")
FALSIFIED, OUTPUTS = 5, 10
"""Most instances for which outputs at counterexamples follow the table, and most outputs of each."""


def register(app: typer.Typer) -> None:
    add_commands(app, logs, metrics, bounds, report, artifacts)


def logs(
    *,
    job_id: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="follow until the job ends")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="only this rank")] = None,
    stream: Annotated[str | None, typer.Option(help="only stdout, stderr or service")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="only this attempt")] = None,
    grep: Annotated[str | None, typer.Option("--grep", "-g", help="only lines with this text, in any case")] = None,
    level: Annotated[Level | None, typer.Option(help="only lines that speak of an error, or of a warning too")] = None,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="only the last lines")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the whole output of the ranks."""
    if stream not in (None, *_STREAMS):
        refuse(f"--stream {stream!r}: expected one of {', '.join(_STREAMS)}")
    chosen = cast(Literal["stdout", "stderr", "service"] | None, stream)
    with client() as service:
        if follow:
            if attempt is not None or tail is not None:
                refuse("--follow shows the job from its beginning and excludes --attempt and --tail")
            wanted = LineFilter(rank, stream, None if grep is None else grep.casefold(), level)
            _follow_logs(service, job_id, wanted, as_json)
            return
        found = service.logs(
            job_id, rank=rank, stream=chosen, attempt=attempt, q=grep, level=level, tail=tail, jsonl=as_json
        )
        for line in found:
            if as_json:
                out.write_json_text(line)
            else:
                out.write_line(_COLOURS.sub("", line))


def _follow_logs(service: Client, job_id: str, wanted: LineFilter, as_json: bool) -> None:
    for event in service.follow(job_id, types=["log"]):
        if event["type"] != "log" or not wanted(event):
            continue
        if as_json:
            out.write_json_line(event)
        else:
            who = "service" if event["rank"] is None else f"rank {event['rank']}"
            out.write_line(f"[{who}] {_COLOURS.sub('', event['line'])}", at_once=True)


def metrics(
    job_id: JobArgument,
    names: Annotated[list[str] | None, typer.Argument(help="only these metrics")] = None,
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
) -> None:
    """Show metrics: first, last, least and greatest value, and a sketch of the curve."""
    with client() as service:
        series = service.metrics(job_id, names=names or None)
        if missing := [name for name in names or () if name not in series]:
            _refuse_missing(service, job_id, missing)
        nothing = "" if series else _nothing(service, job_id, "metrics")
    if as_json:
        print_json({"series": series})
        return
    if as_csv:
        print_csv(tables.metric_rows(series))
        return
    rows = table("metric", "steps", "first", "last", "min", "max", "curve")
    for name, points in series.items():
        values = [value for value in points["value"] if value is not None]
        ends = points["value"][0], points["value"][-1], min(values, default=None), max(values, default=None)
        numbers = ("nan" if value is None else f"{value:.4g}" for value in ends)
        rows.add_row(name, str(points["step"][-1]), *numbers, _sparkline(values))
    out.print(nothing or rows)


def _nothing(service: Client, job_id: str, what: str) -> str:
    """Say why a job has no ``what``: its own jobs have them, it is over, or there are none yet."""
    job = service.job(job_id)
    if job.children:
        return f"{what} belong to its jobs, which this lists: trivet show {job_id}"
    return f"this job reported no {what}" if job.state in TERMINAL else f"no {what} yet"


def _refuse_missing(service: Client, job_id: str, missing: Sequence[str]) -> None:
    """Refuse names of metrics that the job does not have, and list its own; a running job may yet report them."""
    known = service.metrics(job_id, max_points=_FEWEST_POINTS)
    if known or service.job(job_id).state in TERMINAL:
        has = ", ".join(known) or "none"
        refuse(f"job {job_id} has no metric {', '.join(map(repr, missing))}; it has: {has}")


def bounds(job_id: JobArgument, as_json: JsonFlag = False, as_csv: CsvFlag = False) -> None:
    """Show the certified bounds of a verification job, a row per instance."""
    with client() as service:
        found = list(service.bounds(job_id))
        nothing = "" if found else _nothing(service, job_id, "bounds")
    if as_json:
        print_json({"items": found})
        return
    if as_csv:
        print_csv(tables.bound_rows(found))
        return
    named = [each for each in ("label", "prediction", "name") if any(row.get(each) is not None for row in found)]
    rows = table("instance", "verdict", "decided by", "margin", "width", "domains", "seconds", *named)
    for row in found:
        rows.add_row(
            str(row["instance"]), row["verdict"], row["decided_by"] or "", _number(row["margin"]),
            _number(_width(row)), str(row["domains"]), f"{row['seconds']:.3f}",
            *(_text(row.get(each)) for each in named),
        )  # fmt: skip
    if found:
        out.print(f"method: {found[0]['method']}")
    out.print(nothing or rows)
    for row in [row for row in found if row.get("counterexample_outputs")][:FALSIFIED]:
        out.print(_at_counterexample(row))
    for reason, count in Counter(row["reason"] for row in found if row.get("reason")).most_common():
        out.print(f"undecided ({count}): {reason}")
    for note in dict.fromkeys(row["note"] for row in found if row.get("note")):
        out.print(note, markup=False)


def _at_counterexample(row: Mapping[str, Any]) -> str:
    """Return the outputs that falsify an instance, and onnxruntime's if they are known."""
    own, there = _list_values(row["counterexample_outputs"]), row.get("onnxruntime_outputs")
    runtime = f" (by onnxruntime: {_list_values(there)})" if there else ""
    return f"instance {row['instance']}: outputs at its counterexample: {own}{runtime}"


def _list_values(values: Sequence[float | None]) -> str:
    shown = ["not finite" if value is None else _number(value) for value in values[:OUTPUTS]]
    return ", ".join([*shown, "…"] if len(values) > OUTPUTS else shown)


def report(job_id: JobArgument, as_json: JsonFlag = False) -> None:
    """Show a job's report: a compile job's rungs and gate, any other job's result."""
    with client() as service:
        found = service.report(job_id)
    if as_json:
        print_json(found)
        return
    if "rungs" not in found:
        out.block(documents.dump(found).rstrip())
        return
    for sentence in found.get("summary") or ():
        out.print(sentence)
    gate = found.get("gate") or {}
    allowed = [
        f"{phase} {rung_title(gate[phase]) if gate[phase] else 'nothing'}"
        for phase in ("train", "inference")
        if phase in gate
    ]
    out.block(f"gate: {', '.join(allowed)}\n")
    out.print(_ladder(found["rungs"]))
    if any(rung.get("noisy") for rung in found["rungs"]):
        out.print("≈ the timing of this rung was noisy")
    if any(_is_of_other_rounds(rung) for rung in found["rungs"]):
        out.print(
            "vs eager: the median over rounds in which both run in turns; the step medians may come from other rounds"
        )


def rung_title(rung: str) -> str:
    """Return the title of a rung. The first rung runs Dynamo's graphs as they are; steps are compared with
    uncompiled ones.
    """
    return "eager (Dynamo)" if rung == "eager" else rung


def _is_of_other_rounds(rung: Mapping[str, Any]) -> bool:
    """Return whether the ratio clearly differs from that of the two medians beside it."""
    ratio, step, eager = (rung.get(name) for name in ("ratio", "step_ms", "eager_step_ms"))
    return bool(ratio and step and eager) and abs(step / eager - ratio) > _PLAINLY * ratio  # type: ignore[operator]


def _ladder(rungs: list[dict[str, Any]]) -> Table:
    """Return a row per rung of each phase. Missing measurements are empty; a column without any is left out."""
    found = [name for name in ("graph_breaks", "recompiles") if any(rung.get(name) for rung in rungs)]
    rows = table(
        "phase", "rung", "verdict", "step ms", "eager", "vs eager", *(name.replace("_", " ") for name in found)
    )
    for column in rows.columns[:3]:
        column.no_wrap = True
    for rung in rungs:
        counts = (str(len(rung[name])) if rung.get(name) is not None else "" for name in found)
        pace = "" if rung.get("ratio") is None else f"{'≈' if rung.get('noisy') else ''}{rung['ratio']:.2f}×"
        steps = ("" if rung.get(name) is None else f"{rung[name]:.3g}" for name in ("step_ms", "eager_step_ms"))
        verdict = str(rung["verdict"]).replace("_", " ")
        rows.add_row(rung["phase"], rung_title(rung["rung"]), verdict, *steps, pace, *counts)
    return rows


def artifacts(
    job_id: JobArgument,
    name: Annotated[str | None, typer.Argument(help="fetch this one")] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="PATH", help="file to write, or a folder for it; this folder if absent"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List a job's files, or fetch one; folders come as tar archives."""
    with client() as service:
        if name is not None:
            target = _target(service, job_id, name, output or ".")
            size = service.download(job_id, name, target)
            (err if _is_written_to(target, sys.stdout) else out).print(f"{target}: {size} bytes")
            return
        found = service.artifacts(job_id)
    print_list(found, as_json, ("name", "bytes", "sha256"), _artifact_row, "no artifacts")


def _artifact_row(artifact: Artifact) -> tuple[str, str, str]:
    return artifact.name, str(artifact.bytes), artifact.sha256[:16]


def _target(service: Client, job_id: str, name: str, output: str) -> Path:
    """Return the file to write; in a folder, under the artifact's own name. Refuses a missing folder."""
    target = Path(output)
    if target.is_dir():
        return target / _file_name(service, job_id, name)
    if output.endswith("/"):
        refuse(f"there is no folder {output}")
    return target


def _is_written_to(path: Path, stream: IO[str]) -> bool:
    """Return whether a stream leads to the same file, as standard output does to ``/dev/stdout``."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except (OSError, ValueError):
        return False


def _file_name(service: Client, job_id: str, name: str) -> str:
    is_folder = any(artifact.name == name and not artifact.sha256 for artifact in service.artifacts(job_id))
    return Path(name).name + (".tar" if is_folder else "")


_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 24


def _sparkline(values: list[float]) -> str:
    """Draw a curve in a line of text."""
    if not values:
        return ""
    chosen = [values[index * len(values) // _WIDTH] for index in range(_WIDTH)] if len(values) > _WIDTH else values
    low, span = min(chosen), max(chosen) - min(chosen)
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in chosen)


def _width(row: dict[str, Any]) -> float | None:
    widths = [
        upper - lower
        for lower, upper in zip(row["lower"], row["upper"], strict=True)
        if isinstance(lower, float | int) and isinstance(upper, float | int)
    ]
    return max(widths, default=None)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
