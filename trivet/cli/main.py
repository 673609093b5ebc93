"""Assembles the command line: one Typer application, its commands in the modules beside this one."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trivet.cli import (
    accounts,
    audit,
    broker,
    fleet,
    jobs,
    kinds,
    machine,
    projects,
    queue,
    results,
    schedule,
    serve,
    submit,
    uploads,
    vnncomp,
    webhooks,
)
from trivet.cli.context import out

OTHER_NAMES = {
    "describe": "show",
    "download": "artifacts",
    "kill": "cancel",
    "list": "jobs",
    "ls": "jobs",
    "ps": "jobs",
    "rm": "delete",
    "run": "submit",
    "start": "up",
    "status": "show",
    "stop": "cancel",
}
"""Names that other tools give to these commands."""


class _Commands(TyperGroup):
    """Suggests the command when somebody types another tool's name for it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and (name := OTHER_NAMES.get(args[0])) is not None:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{name}'?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="trivet",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (
    serve,
    submit,
    jobs,
    queue,
    results,
    schedule,
    fleet,
    broker,
    projects,
    kinds,
    accounts,
    audit,
    machine,
    uploads,
    vnncomp,
    webhooks,
):
    part.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = importlib.metadata.version("trivet")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed: it runs from its sources)"
        out.print(f"trivet {version}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Train, verify and compile-check models as jobs."""


def main() -> None:
    """Run the ``trivet`` script."""
    _tolerate_narrow_encodings()
    app()


def _tolerate_narrow_encodings() -> None:
    """Print characters that the output's encoding lacks as escapes, rather than end the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
