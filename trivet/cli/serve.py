"""Starting the service or one of its parts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from service.jobs.settings import Settings
from trivet.cli.context import fails_well, out


def register(app: typer.Typer) -> None:
    for command in (up, demo, api, worker):
        app.command()(fails_well(command))


def up() -> None:
    """Run everything on this machine until Ctrl-C: broker, API, dashboard, worker."""
    from trivet.up import run  # noqa: PLC0415 - other commands need neither broker nor processes

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
    """Run the API alone, for real deployments."""
    given = {"--host": host, "--port": port, "--tls-cert": tls_cert, "--tls-key": tls_key}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    _become("api", [*options, *(["--behind-proxy"] if behind_proxy else [])])


def worker() -> None:
    """Run this host's worker alone, for real deployments."""
    _become("workers", [])


def _become(module: str, options: list[str]) -> NoReturn:
    """Replace this process, so that signals reach the part itself."""
    from trivet.local import SAFE_PATH  # noqa: PLC0415

    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *options], {**os.environ, **SAFE_PATH})  # noqa: S606
