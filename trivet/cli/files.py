"""Uploads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trivet.cli.context import JsonFlag, client, fails_well, out, print_json, refuse


def register(app: typer.Typer) -> None:
    app.command()(fails_well(upload))


def upload(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="data, a tokenizer, weights, or an archive")],
    as_json: JsonFlag = False,
) -> None:
    """Upload a file for specs to name; prints its id. The same bytes give the same id."""
    if not path.is_file():
        refuse(f"cannot read {path}: it is not a file")
    with client() as service:
        stored = service.upload(path)
    if as_json:
        print_json(stored)
    else:
        out.write_line(stored.id)
