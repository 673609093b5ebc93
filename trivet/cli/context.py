"""Gives every command the client, output, failures, and times as users write them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.table import Table

from service.jobs.text import visible
from trivet.cli.exit_codes import ExitCode
from trivet.errors import Refused, TrivetError, Unreachable
from trivet.terminal import Terminal

if TYPE_CHECKING:
    from trivet.client import Client

_OFFERED = 50
_PATIENCE_S = 2.0
"""A shell hangs while it waits for completions, so after this time there are none."""


def job_ids(incomplete: str) -> list[tuple[str, str]]:
    """Return the ids that begin as typed, newest first, each with a description for the shell.

    Returns none if no service answers: a completion cannot show an error.
    """
    from trivet.client import Client  # noqa: PLC0415 - as below

    try:
        with Client(timeout_s=_PATIENCE_S) as service:
            found = service.job_page(limit=_OFFERED).items
    except (TrivetError, OSError, ValueError):
        return []
    matching = (job for job in found if job.id == visible(job.id) and job.id.startswith(incomplete))
    return [(job.id, visible(f"{job.state} {job.kind} {job.name}").replace("\n", " ")) for job in matching]


_ELSEWHERE = (
    "If one runs: go to the folder where it was started, or set TRIVET_DATA to the .trivet there, or TRIVET_URL and "
    "TRIVET_KEY"
)
"""Advice if the service of the working folder does not answer."""
_UNTRUSTED = (
    "If this is the right service: set TRIVET_CA_CERT to its certificate, or to that of its authority, and TRIVET_URL "
    "to an address with a name that it has"
)


def _one_form(context: typer.Context, wanted: bool) -> bool:
    if wanted and (context.params.get("as_json") or context.params.get("as_csv")):
        raise typer.BadParameter("the output is either --json or --csv")
    return wanted


JsonFlag = Annotated[bool, typer.Option("--json", callback=_one_form, help="machine-readable output")]
CsvFlag = Annotated[
    bool, typer.Option("--csv", callback=_one_form, help="a table for other programs; lists in it are JSON")
]
JobArgument = Annotated[str, typer.Argument(metavar="ID", help="a job's id", autocompletion=job_ids)]
JobArguments = Annotated[list[str], typer.Argument(metavar="ID...", help="ids of jobs", autocompletion=job_ids)]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

out = Terminal()
err = Terminal(stderr=True)


@contextmanager
def client() -> Iterator[Client]:
    """Yield a client of the configured service."""
    from trivet.client import Client  # noqa: PLC0415 - takes most of the time of a command that may need none

    with Client() as opened:
        try:
            yield opened
        finally:
            if opened.key_expires is not None:
                err.print(f"the API key expires at {opened.key_expires}; rotate it before then (trivet keys rotate)")


def fails_well(command: Callable[P, R]) -> Callable[P, R]:
    """Turn the library's exceptions into a message and an exit code."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except Unreachable as error:
            err.block(str(error), style="red", indent=2)
            err.print("Start one with: trivet up" if error.passes else _UNTRUSTED)
            err.print(_ELSEWHERE if error.url.startswith("unix:") else "or point TRIVET_URL at a running one")
        except Refused as error:
            _show_refusal(error)
        except ValidationError as error:
            err.block(_fields(error), style="red")
        except ModuleNotFoundError as error:
            _name_missing_package(error)
        except BrokenPipeError:
            sys.stderr.close()
            raise typer.Exit(ExitCode.DONE) from None
        except (TrivetError, OSError) as error:
            err.block(str(error), style="red", indent=2)
        except UnicodeEncodeError as error:
            err.print(f"{error.object!r} cannot be sent: it is not valid UTF-8 text", style="red")
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        raise typer.Exit(ExitCode.REFUSED)

    return wrapped


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end what follows as Ctrl-C does, with what it has started and its files."""
    from service.linux import handle_signals  # noqa: PLC0415 - few commands start anything

    with handle_signals(signal.default_int_handler, signal.SIGTERM):
        yield


def _name_missing_package(error: ModuleNotFoundError) -> None:
    """Say what to install for a command that needs more than a client; raise the error again if it is another one."""
    package = (error.name or "").partition(".")[0]
    is_ours = package in ("api", "service", "trivet", "workers")
    if not package or (is_ours and find_spec("api") is not None):
        raise error
    needed = "the service" if is_ours else package
    err.block(
        f"this command needs {needed}, which a client alone does without: pip install 'trivet[service]'", style="red"
    )


def add_commands(app: typer.Typer, *commands: Callable[..., None], **named: Callable[..., None]) -> None:
    """Add commands with such messages, under their functions' names or under these."""
    for command in commands:
        app.command()(fails_well(command))
    for name, command in named.items():
        app.command(name)(fails_well(command))


def add_group(
    app: typer.Typer,
    name: str,
    about: str,
    /,
    *commands: Callable[..., None],
    first: Callable[..., None] | None = None,
    **named: Callable[..., None],
) -> typer.Typer:
    """Add a group of commands and return it; ``first`` is called before any of them, and alone where none is named."""
    group = typer.Typer(help=about, no_args_is_help=first is None, invoke_without_command=first is not None)
    if first is not None:
        group.callback()(fails_well(first))
    add_commands(group, *commands, **named)
    app.add_typer(group, name=name)
    return group


def version_here() -> str | None:
    """Return the installed version; ``None`` if the sources run without one."""
    for name in ("trivet", "trivet-client"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def refuse(message: str) -> NoReturn:
    """End the command: its input was wrong."""
    err.block(message, style="red", indent=2)
    raise typer.Exit(ExitCode.REFUSED)


def each_of(job_ids: Sequence[str], act: Callable[[str], T]) -> tuple[list[T], int]:
    """Act on each of several jobs; return the outcomes and the exit code.

    A refused job is named and does not stop the others.
    """
    done: list[T] = []
    for job_id in job_ids:
        try:
            done.append(act(job_id))
        except Refused as error:
            err.block(f"{job_id}: {error}", style="red", indent=2)
    if 1 < len(job_ids) > len(done):
        err.print(f"{len(done)} of {len(job_ids)} jobs done, {len(job_ids) - len(done)} not")
    return done, ExitCode.DONE if len(done) == len(job_ids) else ExitCode.REFUSED


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    out.write_json(plain(value))


def print_secret(record: BaseModel | None, secret: str, as_json: bool) -> None:
    """Print a secret; as JSON, with the record that it belongs to."""
    if as_json:
        print_json((record.model_dump(mode="json") if record else {}) | {"secret": secret})
    else:
        out.write_line(secret)


def print_csv(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as CSV on standard output, each on one line."""
    from trivet.tables import csv_text  # noqa: PLC0415 - as above

    safe = [{visible(name): _one_line(value) for name, value in row.items()} for row in rows]
    for line in csv_text(safe).split("\n")[:-1]:
        out.write_line(line)


def _one_line(value: Any) -> Any:
    return visible(value) if isinstance(value, str) else value


def plain(value: Any) -> Any:
    """Return models as JSON-compatible data."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def table(*columns: str) -> Table:
    """Return a borderless table."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column == "id")
    return made


def print_list(
    found: Sequence[T], as_json: bool, columns: Sequence[str], row: Callable[[T], Sequence[str]], nothing: str = ""
) -> None:
    """Print what an answer lists as JSON, or as a table with a row each, or that it is ``nothing``."""
    if as_json:
        print_json({"items": plain(found)})
        return
    rows = table(*columns)
    for each in found:
        rows.add_row(*row(each))
    out.print(rows if found or not nothing else nothing)


def _fields(error: ValidationError) -> str:
    """Return a line per field that was refused here, before the service saw it."""
    lines = []
    for each in error.errors(include_url=False):
        got = "" if isinstance(each["input"], dict | list) else f"; got {each['input']!r}"
        lines.append(visible(f"{'.'.join(map(str, each['loc'])) or '(all)'}: {each['msg']}{got}"))
    return "\n".join(lines)


def _show_refusal(error: Refused) -> None:
    if error.status == 401:
        err.block(f"The service needs an API key: {error.detail}", style="red", indent=2)
        return
    if not error.errors:
        err.block(str(error), style="red", indent=2)
        return
    err.print(f"refused: {len(error.errors)} problem{'s' if len(error.errors) > 1 else ''}", style="red")
    for field in error.errors:
        _tell(f"{field['path'] or '(all)'}:", field["message"], 0)
        if field.get("got") is not None:
            _tell("got", json.dumps(field["got"], ensure_ascii=False))
        _tell("expected", str(field["expected"]))
        if field.get("at"):
            _tell("at", str(field["at"]))


def _tell(word: str, text: str, indent: int = 2) -> None:
    """Print a part of a refusal in lines that fit the terminal; in a pipe each is whole."""
    margin, further = " " * indent, " " * (indent + 2)
    for part in text.split("\n"):
        told = textwrap.wrap(f"{word} {visible(part)}", err.width - len(further), break_on_hyphens=False)
        err.block("\n".join([margin + told[0], *told[1:]]), indent=len(further))


_DURATION = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def past(text: str | None) -> datetime | None:
    """Return the time that an option names: an age, or a time."""
    length = duration(text)
    try:
        return _time(text) if length is None else datetime.now(UTC) - length
    except OverflowError:
        refuse(f"{text!r} is too long ago")


def future(text: str | None) -> datetime | None:
    """Return the time that an option names: a time from now, or a time."""
    length = duration(text)
    try:
        return _time(text) if length is None else datetime.now(UTC) + length
    except OverflowError:
        refuse(f"{text!r} is too far ahead")


def duration(text: str | None) -> timedelta | None:
    """Return the duration that a text such as 90d or 24h names; ``None`` for any other text."""
    found = _DURATION.fullmatch(text or "")
    try:
        return None if found is None else timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        refuse(f"{text!r} is too long to count")


def _time(text: str | None) -> datetime | None:
    """Return a time, in UTC if it names no zone."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        refuse(f"{text!r} is neither a length of time such as 2h or 7d nor a time such as 2026-01-31T12:00")
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
