"""Commands that start the service or one of its parts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from trivet.cli.context import add_commands, err, out, refuse


def register(app: typer.Typer) -> None:
    add_commands(app, up, demo, api, worker)


def up() -> None:
    """Run everything on this machine until Ctrl-C: broker, API, dashboard, worker."""
    from service.jobs.settings import Settings  # noqa: PLC0415
    from trivet.up import run  # noqa: PLC0415 - other commands need neither broker nor processes

    _tell_of_unknown_settings()
    raise typer.Exit(run(Settings(), out))


def demo() -> None:
    """Train, verify and compile-check a small classifier on a throw-away service; takes a few minutes."""
    from trivet.demo import run  # noqa: PLC0415

    raise typer.Exit(run(out))


def api(
    host: Annotated[str | None, typer.Option(help="address to bind")] = None,
    port: Annotated[int | None, typer.Option(help="port to bind")] = None,
    behind_proxy: Annotated[bool, typer.Option("--behind-proxy", help="a proxy in front ends TLS")] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="certificate chain, PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="private key, PEM")] = None,
) -> None:
    """Run only the API, for real deployments."""
    given = {"--host": host, "--port": port, "--tls-cert": tls_cert, "--tls-key": tls_key}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    _require("fastapi")
    _become("api", [*options, *(["--behind-proxy"] if behind_proxy else [])])


def worker(
    join: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN@URL",
            help="invitation (`trivet broker invite`), or a file that holds it; - for standard input",
        ),
    ] = None,
) -> None:
    """Run only this host's worker, for real deployments."""
    _require("celery")
    _become("workers", [], {} if join is None else _join_fleet(join))


def _tell_of_unknown_settings() -> None:
    """Say which variables are no settings: a limit whose name is misspelt would be none."""
    from service.jobs.settings import unknown_variables  # noqa: PLC0415

    for told in unknown_variables():
        err.print(told, style="yellow")


def _require(package: str) -> None:
    """Refuse a part of the service where only the client is installed. Raises :class:`ModuleNotFoundError`."""
    if find_spec(package) is None:
        raise ModuleNotFoundError(name=package)


def _join_fleet(given: str) -> dict[str, str]:
    """Return the variables of an invited worker."""
    from service.jobs.settings import Invitation, NoInvitation  # noqa: PLC0415
    from trivet.joining import join  # noqa: PLC0415 - others need no store

    text = given if "@" in given else sys.stdin.read() if given == "-" else Path(given).read_text()
    try:
        return join(Invitation.read(text))
    except NoInvitation as error:
        refuse(str(error))


def _become(module: str, options: list[str], variables: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process, so that signals reach the part itself and this command's arguments disappear."""
    from trivet.local import SAFE_PATH  # noqa: PLC0415

    _tell_of_unknown_settings()
    sys.stdout.flush()
    environment = {**os.environ, **(variables or {}), **SAFE_PATH}
    os.execve(sys.executable, [sys.executable, "-m", module, *options], environment)  # noqa: S606
