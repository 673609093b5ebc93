"""Commands for this machine: its problems, and a first spec to change."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from service.jobs.settings import Settings
from trivet.cli.context import JsonFlag, fails_well, out, print_json, refuse
from trivet.cli.first_spec import KINDS, first_spec

_WRONG = 1
_STYLES = {"ok": "green", "warning": "yellow", "wrong": "red"}


def register(app: typer.Typer) -> None:
    app.command()(fails_well(doctor))
    app.command()(fails_well(init))


def doctor(as_json: JsonFlag = False) -> None:
    """Say what is wrong with this machine: packages, torch, GPUs, broker, disk, port. Exit 1 if anything is."""
    from trivet.doctor import examine  # noqa: PLC0415 - it brings the whole service, which no other command needs

    found = []
    for finding in examine(Settings()):
        found.append(finding)
        if not as_json:
            out.print(f"{finding.status:>8}  {finding.subject}: {finding.told}", style=_STYLES[finding.status])
            if finding.advice:
                out.print(f"          {finding.advice}")
    if as_json:
        print_json({"findings": [asdict(finding) for finding in found]})
    raise typer.Exit(_WRONG if any(finding.status == "wrong" for finding in found) else 0)


def init(
    kind: Annotated[str, typer.Argument(help=", ".join(KINDS))],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="file to write; KIND.yaml if absent")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a file that is there")] = False,
) -> None:
    """Write a spec that runs as it is, with every further field as a comment: its default and its meaning."""
    if kind not in KINDS:
        refuse(f"there is no kind {kind!r} to begin with; expected {', '.join(KINDS)}")
    target = output or Path(f"{kind}.yaml")
    if target.exists() and not force:
        refuse(f"{target} exists; --force replaces it, --output writes another file")
    target.write_text(first_spec(kind))
    out.print(f"{target}: change it, then: trivet submit {target} --watch")
