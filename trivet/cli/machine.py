"""Commands for this machine: its backups, its problems, and a first spec to change."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trivet.cli.context import JsonFlag, add_commands, err, out, print_json, refuse
from trivet.cli.exit_codes import ExitCode
from trivet.cli.first_spec import first_spec

KINDS = ("train", "verify", "compile", "chain", "script")
_TO_FILL_IN = {"model.job=ID": "model.job=ID", "archive=@": "archive=@FOLDER"}
"""What an example says of values that it cannot have, with the value of ``--set`` that gives them."""


def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="a new file, which holds secrets: it is its owner's only")
    ],
    as_json: JsonFlag = False,
) -> None:
    """Back up the jobs, events, keys, uploads and artifacts of the data folder's service, while it runs."""
    from service.jobs.host import ENV_PREFIX  # noqa: PLC0415
    from service.jobs.settings import Settings  # noqa: PLC0415
    from service.jobs.store import Store, StoreUnavailable  # noqa: PLC0415
    from service.jobs.store.backup import BackupError, make  # noqa: PLC0415 - other commands need no store

    settings = Settings()
    if settings.redis_url is not None:
        refuse(
            f"{ENV_PREFIX}REDIS_URL names a separate broker: back it up by its own means first, then copy jobs, files "
            f"and audit of {settings.layout.root}"
        )
    store = Store.connect(settings.broker_url, settings.layout)
    try:
        made = make(settings.layout, store, file)
    except StoreUnavailable as error:
        refuse(f"{error}: is 'trivet up' running on {settings.layout.root}?")
    except (BackupError, OSError) as error:
        refuse(str(error))
    finally:
        store.close()
    if as_json:
        print_json(
            {"files": made.files, "bytes": made.bytes, "vanished": list(made.vanished), "unusable": list(made.unusable)}
        )
        return
    out.print(f"{file}: {made.files} files, {made.bytes} bytes")
    if made.vanished:
        out.print(f"{len(made.vanished)} files are not in it, because the service deleted them meanwhile")
    if made.unusable:
        missing = "files of jobs are missing from it, or were changed or cut short"
        out.print(f"{len(made.unusable)} {missing}: {made.unusable[0][:200]}, …")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a file that 'trivet backup' wrote")],
    as_json: JsonFlag = False,
) -> None:
    """Restore a backup into the data folder, which must be empty or absent. Running jobs are queued again: end
    the old service first, or they run there as well.
    """
    from service.jobs.host import NotPrivateError  # noqa: PLC0415
    from service.jobs.host.embedded_broker import BrokerError  # noqa: PLC0415
    from service.jobs.settings import Settings  # noqa: PLC0415
    from service.jobs.store.backup import BackupError, restore  # noqa: PLC0415

    settings = Settings()
    try:
        found = restore(file, settings.layout, settings.broker_fsync)
    except (BackupError, BrokerError, NotPrivateError, OSError) as error:
        refuse(str(error))
    if as_json:
        print_json({"files": found.files, "bytes": found.bytes, "queued": list(found.queued)})
        return
    out.print(f"{settings.layout.root}: {found.files} files, {found.bytes} bytes; start it with: trivet up")
    if found.queued:
        out.print(f"queued again, because they were running when the backup was made: {' '.join(found.queued)}")


_STYLES = {"ok": "green", "warning": "yellow", "wrong": "red"}


def register(app: typer.Typer) -> None:
    add_commands(app, backup, restore, doctor, init)


def doctor(as_json: JsonFlag = False) -> None:
    """Say what is wrong with this machine: packages, torch, GPUs, broker, disk, port. Exit 1 if anything is."""
    from service.jobs.settings import Settings  # noqa: PLC0415
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
    raise typer.Exit(ExitCode.FAILED if any(finding.status == "wrong" for finding in found) else ExitCode.DONE)


def init(
    kind: Annotated[str, typer.Argument(help=", ".join(KINDS))],
    file: Annotated[
        Path | None, typer.Argument(help="file to write; if absent KIND.yaml, or standard output in a pipe")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the same")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
) -> None:
    """Write a spec that can be submitted at once, with every further field as a comment: default and meaning.

    A verification or a compile check names the training of its model when it is submitted, and a script its folder.
    """
    if kind not in KINDS:
        refuse(f"there is no example of kind {kind!r}; expected {', '.join(KINDS)}")
    text = first_spec(kind)
    given = "".join(f" --set {value}" for said, value in _TO_FILL_IN.items() if said in text)
    if output is None and file is None and not sys.stdout.isatty():
        out.file.write(text)
        err.print(f"change it, then: trivet submit FILE{given} --watch")
        return
    target = output or file or Path(f"{kind}.yaml")
    if target.exists() and not force:
        refuse(f"{target} exists; --force replaces it, --output writes another file")
    target.write_text(text)
    out.print(f"{target}: change it, then: trivet submit {target}{given} --watch")
