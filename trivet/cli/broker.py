"""Commands for the users of a broker that several hosts share."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from trivet.cli.context import add_group, out, refuse


def register(app: typer.Typer) -> None:
    add_group(app, "broker", "The broker of a deployment.", acl=access_list, invite=invite)


def access_list(
    folder: Annotated[Path, typer.Argument(help="folder with one password file per user, named after the user")],
    add: Annotated[
        list[str] | None,
        typer.Option(help="user that gets a password unless it has one: api, host or host-NAME; may be repeated"),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="write the list here; printed when absent")] = None,
) -> None:
    """Write the access list of the broker's users, for its `aclfile`: the rights of the API and of hosts."""
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


def invite(
    folder: Annotated[Path, typer.Argument(help="folder with one password file per user, named after the user")],
    user: Annotated[str, typer.Argument(help="the host's user: host or host-NAME")],
    url: Annotated[str, typer.Argument(help="address at which the host reaches the broker: rediss://NAME:6379/0")],
    ca_cert: Annotated[
        Path | None,
        typer.Option(help="PEM certificate of the broker or of its authority, if hosts do not trust it already"),
    ] = None,
) -> None:
    """Print an invitation, with which `trivet worker --join` adds another host to the fleet. It holds the
    user's password, so send it as you would send a password.
    """
    from service.jobs.settings import Invitation  # noqa: PLC0415
    from service.jobs.store import acl  # noqa: PLC0415

    try:
        if acl.role_of(user) is not acl.HOST:
            refuse(f"{user} is not a host's user; expected host or host-NAME")
        if user not in (passwords := _passwords(folder)):
            refuse(
                f"no {folder / user}: run `trivet broker acl {folder} --add {user}`, and let the broker read its list"
            )
        certificate = None if ca_cert is None else ca_cert.read_text()
        out.write_line(str(Invitation(url, user, passwords[user], certificate)))
    except ValueError as error:
        refuse(str(error))


def _make_password(folder: Path, user: str) -> None:
    """Write 256 random bits. Containers read the file as their own users, so only the folder protects it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(folder / user, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o644)
            file.write(secrets.token_hex(32) + "\n")


def _passwords(folder: Path) -> dict[str, str]:
    files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return {path.name: path.read_text().strip() for path in files if path.is_file()}
