"""Assembles the command line: one Typer application, its commands in the modules beside this one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trivet.cli.context import out, version_here

PARTS = {
    "serve": ("up", "demo", "api", "worker"),
    "submit": ("submit", "validate", "watch", "upload"),
    "jobs": ("jobs", "show", "compare", "cancel", "retry"),
    "delete": ("delete",),
    "queue": ("queue", "shares"),
    "results": ("logs", "metrics", "bounds", "report", "artifacts"),
    "schedule": ("schedule",),
    "fleet": ("alerts", "settings", "hosts", "keys"),
    "broker": ("broker",),
    "projects": ("share", "projects"),
    "kinds": ("kinds",),
    "accounts": ("accounts",),
    "audit": ("audit",),
    "machine": ("backup", "restore", "doctor", "init"),
    "uploads": ("uploads",),
    "vnncomp": ("vnncomp",),
    "vnnlib": ("vnnlib",),
    "webhooks": ("webhooks",),
}
"""The modules beside this one that have commands, in the order of the help, and the commands of each."""

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


def program(words: Sequence[str] = ()) -> typer.Typer:
    """Return the application with all commands, or with those of the one module that has the command of the first word:
    to load the others would take as long as a command does.
    """
    app = typer.Typer(
        name="trivet",
        cls=_Commands,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    for part in [part for part, commands in PARTS.items() if words and words[0] in commands] or PARTS:
        importlib.import_module(f"trivet.cli.{part}").register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"trivet {version_here() or '(not installed: it runs from its sources)'}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Train, verify and compile-check models as jobs."""


def main() -> None:
    """Run the ``trivet`` script."""
    _tolerate_narrow_encodings()
    program(sys.argv[1:])()


def _tolerate_narrow_encodings() -> None:
    """Print characters that the output's encoding lacks as escapes, rather than end the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
