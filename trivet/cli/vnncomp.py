"""Commands for VNN-COMP: the competition's interface, and a score by its rules."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trivet.cli.context import add_group, err, interrupted_by_sigterm, out, refuse, table
from trivet.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from trivet.vnncomp.answers import Decided
    from trivet.vnncomp.deciding import Asking
    from trivet.vnncomp.questions import Question
    from trivet.vnncomp.scoring import CategoryScore

OWN = "trivet"

_Category = Annotated[str, typer.Argument(metavar="CATEGORY", help="the benchmark's name")]
_Onnx = Annotated[
    str,
    typer.Argument(
        metavar="ONNX", help="network, gzipped or not, .gz may be left out; or networks: [('NAME', 'ONNX'), …]"
    ),
]
_Vnnlib = Annotated[Path, typer.Argument(metavar="VNNLIB", help="query of VNN-LIB 1 or 2.0, likewise")]
_Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="where to decide; auto: on a GPU if there is one")
]


def register(app: typer.Typer) -> None:
    add_group(app, "vnncomp", "VNN-COMP: its interface, and scores by its rules.", prepare, run, score)


def prepare(category: _Category, onnx: _Onnx, vnnlib: _Vnnlib, device: _Device = "auto") -> None:
    """Read both files of an instance, and trace its network, so that the run need not. Exit 2 if it cannot be run."""
    from trivet.vnncomp import deciding  # noqa: PLC0415 - as are the others: most commands need none of it

    with interrupted_by_sigterm():
        deciding.prepare(_question(category, onnx, vnnlib), find_decider(device))


def run(
    *,
    category: _Category,
    onnx: _Onnx,
    vnnlib: _Vnnlib,
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="file for the verdict and the witness")],
    timeout: Annotated[float, typer.Argument(metavar="TIMEOUT", min=0.001, help="seconds")],
    device: _Device = "auto",
) -> None:
    """Decide an instance, by the service if one answers, and write its results file: sat, unsat, unknown, timeout or
    error, and the witness of sat. What is not decided says why on standard error.
    """
    from service.jobs.files import atomic_write  # noqa: PLC0415
    from trivet.vnncomp.deciding import decide  # noqa: PLC0415

    def ask(*question: Any) -> Mapping[str, Any] | None:
        return find_decider(device)(*question)  # what is wrong with the service is part of the answer, too

    with interrupted_by_sigterm():
        decided = decide(lambda: _question(category, onnx, vnnlib), ask, timeout)
    atomic_write(results, decided.text().encode())
    out.write_line(decided.verdict)
    if decided.reason:
        err.print(f"{decided.verdict}: {decided.reason}")


def _question(category: str, onnx: str, vnnlib: Path) -> Question:
    from trivet.vnncomp.instances import networks_in  # noqa: PLC0415
    from trivet.vnncomp.questions import Question  # noqa: PLC0415

    return Question.read(category, {name: Path(path) for name, path in networks_in(onnx).items()}, vnnlib)


def find_decider(device: Literal["auto", "cpu", "cuda"], at_once: int = 1) -> Asking:
    from trivet.vnncomp.deciding import asking, service_here  # noqa: PLC0415

    client = service_here()
    if client is None:
        err.print("no service answers here: a process of its own decides")
    return asking(client, device, at_once)


def score(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a benchmark with instances.csv, or a folder of benchmarks")
    ],
    into: Annotated[Path, typer.Option(metavar="DIR", help="folder for results.csv, score.csv and witnesses")] = Path(
        "vnncomp-results"
    ),
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME=DIR", help="folder with results.csv of another tool, and its witnesses"),
    ] = None,
    at_once: Annotated[int, typer.Option("--jobs", min=1, help="instances at a time")] = 1,
    most_s: Annotated[float | None, typer.Option("--limit", min=0.001, help="seconds of an instance at most")] = None,
    device: _Device = "auto",
) -> None:
    """Run benchmarks at their own limits, and count points by the competition's rules. What has a row in results.csv
    is not run again. Exit 1 on a wrong verdict.
    """
    from trivet.vnncomp.deciding import decide  # noqa: PLC0415
    from trivet.vnncomp.instances import BenchmarkInstance, instances, labels  # noqa: PLC0415
    from trivet.vnncomp.questions import Question  # noqa: PLC0415
    from trivet.vnncomp.scoring import missed, scores  # noqa: PLC0415
    from trivet.vnncomp.series import ResultsFolder  # noqa: PLC0415

    others = dict[str, ResultsFolder]()
    for name, path in map(_peer, peers or ()):
        if name in {OWN, *others}:
            refuse(f"--peer {name}=DIR: expected a name of its own for each peer, not {OWN}, which is this tool")
        others[name] = ResultsFolder(path)
    every, own, ask = instances(folder), ResultsFolder(into), find_decider(device, at_once)

    def answer(each: BenchmarkInstance) -> Decided:
        limit = each.limit_s if most_s is None else min(each.limit_s, most_s)
        return decide(lambda: Question.read(each.category, each.networks, each.folder / each.vnnlib), ask, limit)

    own.run(every, answer, at_once, out.write_line)
    keys, tools = [each.key for each in every], {name: each.recorded(every) for name, each in others.items()}
    results = own.recorded(every)
    known = labels(every)
    found = scores(keys, {OWN: results, **tools}, known)
    _show(found, into / "score.csv")
    for key, names in missed(keys, results, tools, known):
        reason = results[key].reason if key in results else ""
        out.write_line(f"open, decided by {', '.join(names)}: {' '.join(key)}{reason and f': {reason}'}")
    if wrong := [key for each in found if each.tool == OWN for key in each.wrong]:
        err.block("\n".join(f"wrong: {' '.join(key)}" for key in wrong), style="red")
        raise typer.Exit(ExitCode.FAILED)


def _peer(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or not name or not (Path(path) / "results.csv").is_file():
        refuse(f"--peer {text!r}: expected NAME=DIR, and a file DIR/results.csv")
    return name, Path(path)


def _show(found: list[CategoryScore], path: Path) -> None:
    """Print the scores, with a line for all categories of each tool, and write them as CSV."""
    rows = table(*_COLUMNS)
    cells = [_cells(each.category, each.tool, [each]) for each in found]
    for tool in dict.fromkeys(each.tool for each in found):
        cells.append(_cells("all", tool, [each for each in found if each.tool == tool]))
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([_COLUMNS, *cells])
    for row in cells:
        rows.add_row(*row)
    out.print(rows)


_COLUMNS = "category", "tool", "instances", "unsat", "sat", "wrong", "points", "score", "seconds"


def _cells(category: str, tool: str, each: list[CategoryScore]) -> list[str]:
    counts = [
        sum(part) for part in zip(*((s.instances, s.unsat, s.sat, len(s.wrong), s.points) for s in each), strict=True)
    ]
    percent, seconds = sum(s.percent for s in each), sum(s.seconds for s in each)
    return [category, tool, *map(str, counts), f"{percent:.1f}", f"{seconds:.1f}"]
