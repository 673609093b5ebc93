"""Assembles the command line: one Typer application, its commands in the modules beside this one."""

from __future__ import annotations

import typer

from trivet.cli import fleet, jobs, kinds, results, schedule, serve, submit
from trivet.terminal import tolerate_narrow_encodings

app = typer.Typer(
    name="trivet",
    help="Train, verify and compile-check models as jobs.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (serve, submit, jobs, results, schedule, fleet, kinds):
    part.register(app)


def main() -> None:
    """Run the ``trivet`` script."""
    tolerate_narrow_encodings()
    app()
