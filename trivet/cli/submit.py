"""Commands that submit and watch jobs, and upload the files of their specs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trivet.cli import specs, sweeps
from trivet.cli.context import JobArgument, JsonFlag, add_commands, client, err, out, print_json, refuse
from trivet.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from service.jobs.records import Job
    from trivet.cli.specs import SpecFile
    from trivet.client import Client
    from trivet.terminal import Terminal

_MOST_WATCHED = 100
"""Most jobs that one stream of events follows."""
_ATTACHED = re.compile(r"(?<![^\[\s,:{])@([^\s,\[\]{}]+)")
"""A bare ``@path`` at the beginning of a value; no unquoted YAML value begins with ``@``."""


Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="change a value, as optimizer.lr=0.01; model.onnx=@FILE uploads the file"
    ),
]


def register(app: typer.Typer) -> None:
    add_commands(app, submit, validate, watch, upload)


def submit(
    *,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="SPEC...", help="YAML or JSON files; - for standard input")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="FILE", help="a file with a list of specs; - for standard input")
    ] = None,
    watching: Annotated[bool, typer.Option("--watch", "-w", help="follow the jobs until they end")] = False,
    changes: Changes = None,
    project: Annotated[
        str | None, typer.Option(help="the jobs' project, for an operator's key; else the key's own")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Submit one job, or several, all or none. With --watch, exit 0 if all succeed, 1 if not. A refused spec
    exits 2.
    """
    if bool(files) == (batch is not None):
        refuse("name one or more SPEC files, or a list of specs with --batch")
    changed = _upload_attached(changes or (), project)
    given = [specs.read(file, changed) for file in files or ()]
    if batch is not None:
        _submit_many(specs.read_batch(batch, changed), project, watching, as_json)
    elif len(given) == 1:
        _submit_one(given[0], project, watching, as_json)
    else:
        _submit_many(given, project, watching, as_json)


def _submit_many(given: list[SpecFile], project: str | None, watching: bool, as_json: bool) -> None:
    if watching and len(given) > _MOST_WATCHED:
        refuse(f"--watch follows {_MOST_WATCHED} jobs at most, and these are {len(given)}")
    with client() as service:
        with specs.blamed_batch(given):
            ids = [job.id for job in service.submit_many([each.spec for each in given], project=project)]
        if as_json and not watching:
            print_json(ids)
        else:
            for job_id in ids:
                (err if watching else out).write_line(job_id)
        if watching:
            titles = {job_id: f"{_title(each.spec)} {job_id}" for job_id, each in zip(ids, given, strict=True)}
            _follow_many(service, titles, as_json=as_json)


def _title(spec: dict[str, Any]) -> str:
    return " ".join(filter(None, (str(spec.get("kind", "")), str(spec.get("name") or ""))))


def _follow_many(service: Client, titles: dict[str, str], *, as_json: bool) -> None:
    from trivet.cli import progress  # noqa: PLC0415 - its bars take long to import, and few commands show any

    events = service.follow_all(list(titles), types=None if as_json else progress.WATCHED)
    if as_json:
        for event in events:
            out.write_json_line(event)
    else:
        progress.show(out, titles, events)
    if any(service.job(job_id).state != "succeeded" for job_id in titles):
        raise typer.Exit(ExitCode.FAILED)


def _submit_one(given: SpecFile, project: str | None, watching: bool, as_json: bool) -> None:
    with client() as service:
        with given.blamed():
            job = service.submit(given.spec, project=project)
        if watching:
            if not as_json:
                err.print(f"submitted {job.id}")
            _finish(service, job, as_json=as_json)
        elif as_json:
            print_json(job)
        else:
            out.write_line(job.id)


def validate(
    files: Annotated[list[str], typer.Argument(metavar="SPEC...", help="YAML or JSON files; - for standard input")],
    changes: Changes = None,
    project: Annotated[str | None, typer.Option(help="the project that the jobs would belong to")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check specs like a submission, and submit nothing. A spec that would be refused exits 2."""
    told = []
    changed = _upload_attached(changes or (), project)
    with client() as service:
        for given in [specs.read(file, changed) for file in files]:
            with given.blamed():
                told.append({"spec": given.source, **service.check(given.spec, project=project)})
    if as_json:
        print_json(told)
        return
    for each in told:
        jobs, ranks = (f"{each[name]} {name if each[name] != 1 else name[:-1]}" for name in ("jobs", "ranks"))
        out.write_line(f"{each['spec']}: would be accepted, {jobs} of {ranks}")


def watch(job_id: JobArgument, as_json: JsonFlag = False) -> None:
    """Follow a job until it ends: exit 0 if it succeeded, 1 if not. With --json: its events, one per line."""
    with client() as service:
        _finish(service, service.job(job_id), as_json=as_json)


def _finish(service: Client, job: Job, *, as_json: bool) -> None:
    """Follow a job to its end; then print its result and the next command, or its failure. Exit with 1 unless
    it succeeded.
    """
    if as_json:
        for event in service.follow(job.id):
            out.write_json_line(event)
    else:
        title = f"{job.kind} {job.name}" if job.name != job.kind else job.kind
        from trivet.cli import progress  # noqa: PLC0415

        progress.show(out, {job.id: title}, service.follow(job.id, types=progress.WATCHED))
    over = service.job(job.id)
    if not as_json and over.children is not None:
        sweeps.show_jobs(service, over, out)
    elif not as_json:
        tell(over, out, err)
    if over.state != "succeeded":
        if as_json and over.error is not None:
            err.block(str(over.error), style="red", indent=2)
        raise typer.Exit(ExitCode.FAILED)


def upload(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="models, queries, data, tokenizers, weights, archives, folders"),
    ],
    project: Annotated[
        str | None, typer.Option(help="the upload's project, for an operator's key; else the key's own")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Upload files for specs, and print the id of each on a line. The same bytes give the same id."""
    for path in paths:
        if not path.exists():
            refuse(f"cannot read {path}: there is no such file or folder")
    with client() as service:
        stored = [service.upload(path, project=project) for path in paths]
    if as_json:
        print_json(stored[0] if len(stored) == 1 else stored)
    else:
        for each in stored:
            out.write_line(each.id)


_NEXT = MappingProxyType(
    {
        "train": "certify it: trivet submit verify.yaml --set model.job={id}\n  (trivet init verify writes the file)",
        "verify": "each instance: trivet bounds {id}",
        "compile": "each rung: trivet report {id}",
    }
)
_ANY_KIND = "all results: trivet show {id}"
_SHOWN_ELSEWHERE = frozenset({"completed", "stopped", "data_sha256"})


def tell(job: Job, out: Terminal, err: Terminal) -> None:
    """Print the result of a successful job to ``out``, the reason of any other end to ``err``."""
    if job.state == "succeeded":
        for line in result_lines(job.result or {}):
            out.print(f"  {line}")
        leaves_a_model = job.kind != "train" or job.spec.get("program") is None
        out.block((_NEXT.get(job.kind, _ANY_KIND) if leaves_a_model else _ANY_KIND).format(id=job.id))
        if command := _suggest_training(job):
            out.print(command)
        return
    if job.error is not None:
        err.block(str(job.error), style="red", indent=2)
        err.print(f"see: trivet logs {job.id}")
    if job.error is not None and job.error.final:
        err.print("it would fail again: change its spec, and submit that")
    else:
        err.print(f"again, from its last checkpoint if it has one: trivet retry {job.id}")


def _suggest_training(job: Job) -> str | None:
    """Return the command that trains with the modes that a compile check allows, on its mesh; None if there is none."""
    gate = (job.result or {}).get("gate") if job.kind == "compile" else None
    phases = [phase for phase in ("train", "inference") if isinstance(gate, dict) and gate.get(phase)]
    if not phases:
        return None
    mesh = ", ".join(f"{name}: {size}" for name, size in job.spec["parallel"].items() if size != 1)
    asked = "".join(f"{phase}: true, " for phase in phases)
    compiled = f"--set 'compile={{{asked}gate: {job.id}}}' --set 'parallel={{{mesh}}}'"
    return f"train with it: trivet submit train.yaml {compiled}"


def result_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per fact of a result: sentences as they are, numbers by name, counts by name in one line.

    Deeper nesting is left to the job's report.
    """
    for name, value in result.items():
        if name in _SHOWN_ELSEWHERE:
            continue
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            yield from value
        elif isinstance(value, dict) and value and all(_is_scalar(each) for each in value.values()):
            yield f"{_words(name)}: {', '.join(f'{key} {_format_value(each)}' for key, each in value.items())}"
        elif _is_scalar(value) and value is not None:
            yield f"{_words(name)}: {_format_value(value)}"


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _upload_attached(changes: Sequence[str], project: str | None) -> list[str]:
    """Upload the files in changes of a spec (``model.onnx=@mine.onnx``) and return the changes with their ids.
    A file is uploaded once; if one cannot be read, none is uploaded.
    """
    named = {path for change in changes for path in _paths(change)}
    for path in sorted(named):
        if not Path(path).exists():
            refuse(f"--set: cannot read {path}: there is no such file or folder")
    if not named:
        return list(changes)
    with client() as service:
        ids = {path: service.upload(Path(path), project=project).id for path in sorted(named)}
    return [_with_ids(change, ids) for change in changes]


def _paths(change: str) -> list[str]:
    text = change.partition("=")[2]
    return [text[1:]] if _is_whole(text) else _ATTACHED.findall(text)


def _is_whole(text: str) -> bool:
    """Return whether the value is a single file or folder, whose path may have spaces and commas."""
    return text.startswith("@") and Path(text[1:]).exists()


def _with_ids(change: str, ids: dict[str, str]) -> str:
    path, equals, text = change.partition("=")
    if _is_whole(text):
        return f"{path}={ids[text[1:]]}"
    return path + equals + _ATTACHED.sub(lambda found: ids[found[1]], text)
