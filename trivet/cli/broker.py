"""The users of a broker that several hosts share."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from trivet.cli.context import fails_well, out, refuse

broker_app = typer.Typer(help="The broker of a deployment.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    broker_app.command("acl")(fails_well(access_list))
    app.add_typer(broker_app, name="broker")


@broker_app.callback()
def _group() -> None:
    """Keep ``acl`` a word of its own while it is the only command."""


def access_list(
    folder: Annotated[Path, typer.Argument(help="folder with a file per user, named like it, that holds its password")],
    add: Annotated[
        list[str] | None,
        typer.Option(help="user to make a password for unless it has one: api, host or host-NAME; may be repeated"),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="write the list here; printed when absent")] = None,
) -> None:
    """Write the access list of the broker's users, for its `aclfile`: what the API may do, and what hosts may."""
    from service.jobs.store import acl  # noqa: PLC0415 - loads every script, which other commands do not need

    try:
        for user in add or ():
            acl.role_of(user)
            _make_password(folder, user)
        listed = acl.access_list(_passwords(folder))
    except ValueError as error:
        refuse(str(error))
    if output is None:
        for line in listed.splitlines():
            out.write_line(line)
    else:
        output.write_text(listed)


def _make_password(folder: Path, user: str) -> None:
    """Write 256 random bits. Containers read such a file as users of their own, so the folder is what keeps it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(folder / user, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o644)
            file.write(secrets.token_hex(32) + "\n")


def _passwords(folder: Path) -> dict[str, str]:
    files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return {path.name: path.read_text().strip() for path in files if path.is_file()}
