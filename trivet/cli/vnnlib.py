"""Commands of the solver interface that VNN-LIB 2.0 describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trivet.cli.context import err, fails_well, interrupted_by_sigterm, out, refuse, version_here
from trivet.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from trivet.vnncomp.answers import Decided
    from trivet.vnncomp.questions import Question

NAME, LONGEST_S = "Trivet", 10**6
vnnlib_app = typer.Typer(help="VNN-LIB 2.0: its interface of solvers.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    vnnlib_app.callback()(options)
    vnnlib_app.command()(fails_well(verify))
    vnnlib_app.command(context_settings={"ignore_unknown_options": True})(fails_well(supports))
    app.add_typer(vnnlib_app, name="vnnlib")


def _print_name(wanted: bool) -> None:
    if wanted:
        out.write_line(NAME)
        raise typer.Exit


def _print_version(wanted: bool) -> None:
    if wanted:
        out.write_line(version_here() or "0.0.0")
        raise typer.Exit


def options(
    name: Annotated[bool, typer.Option("--name", callback=_print_name, is_eager=True, help="print the name")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Speak the interface of solvers that VNN-LIB 2.0 describes."""


def supports(
    capability: Annotated[str, typer.Argument(metavar="--CAPABILITY", help="such as --onnx-operators")],
) -> None:
    """Print what can be verified, an item on a line."""
    from trivet.vnncomp.capabilities import CAPABILITIES  # noqa: PLC0415 - as are the others: most commands need none

    answer = CAPABILITIES.get(capability.removeprefix("--")) if capability.startswith("--") else None
    if answer is None:
        refuse(f"supports {capability}: expected one of {', '.join(f'--{name}' for name in CAPABILITIES)}")
    for line in answer():
        out.write_line(line)


def verify(
    *,
    query: Annotated[Path, typer.Argument(metavar="QUERY", help="query of VNN-LIB 2.0, gzipped or not")],
    networks: Annotated[
        list[str] | None,
        typer.Option("--network", metavar="NAME=FILE", help="the ONNX file of a network that the query declares"),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.001, max=LONGEST_S)] = LONGEST_S,
    serialise: Annotated[
        Path | None,
        typer.Option("--serialise-assignments", metavar="FOLDER", help="write tensors there, not their text"),
    ] = None,
    as_real: Annotated[
        bool, typer.Option("--as-real", help="take floating-point types for real ones: bounds know no other")
    ] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: on a GPU if there is one")] = "auto",
) -> None:
    """Say whether a query is satisfiable: sat and an assignment, unsat, unknown or timed-out. Without a verdict, the
    reason is on standard error.
    """
    from trivet.cli.vnncomp import find_decider  # noqa: PLC0415
    from trivet.vnncomp.deciding import decide  # noqa: PLC0415
    from trivet.vnncomp.questions import Question  # noqa: PLC0415

    named = [_named(text) for text in networks or ()]
    if len(given := dict(named)) < len(named):
        refuse(f"--network {', '.join(networks or ())}: expected one file for each name")
    question = Question.read(NAME, given, query)
    if not question.networks:
        refuse(f"{query} is VNN-LIB 1, without names of networks: `trivet vnncomp run` takes it")
    if not as_real:
        _check_types(question)
    with interrupted_by_sigterm():
        decided = decide(lambda: question, find_decider(device), timeout)
    if decided.reason:
        err.print(f"{decided.verdict}: {decided.reason}")
    if decided.verdict == "error":
        raise typer.Exit(ExitCode.FAILED)
    out.write_line("timed-out" if decided.verdict == "timeout" else decided.verdict)
    _show(decided, serialise)


def _named(text: str) -> tuple[str | None, Path]:
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        refuse(f"--network {text!r}: expected NAME=FILE")
    return name, Path(path)


def _check_types(question: Question) -> None:
    """Refuse types whose roundings bounds know nothing of; the standard wants consent to that."""
    for tensor in (tensor for network in question.networks for tensor in network.tensors):
        if not tensor.is_real:
            refuse(
                f"line {tensor.line}: {tensor.name} is {tensor.kind}, and bounds are those of real arithmetic: "
                "expected the type real, or --as-real as consent"
            )


def _show(decided: Decided, folder: Path | None) -> None:
    from trivet.vnncomp.declared import DeclaredWitness  # noqa: PLC0415

    if not isinstance(decided.witness, DeclaredWitness):
        return
    if folder is None:
        for line in decided.witness.text().splitlines():
            out.write_line(line)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in decided.witness.serialised():
        (folder / f"{name}.pb").write_bytes(content)
