"""Keeps the list of public names, ``docs/site/public.json``, which a test compares with the code.

``python docs/site/public.py`` adds new names. A name that the code has no longer stays in the list, and the test fails:
``--drop NAME …`` takes one out, for a change that the changelog names. ``--client VERSION`` writes how the client of a
release reads answers, to ``tests/released``, for the tests of every later service.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main
from pydantic import BaseModel, TypeAdapter

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import trivet  # noqa: E402 - which the line before makes importable
from docs.site import rest, specs  # noqa: E402
from service.jobs.accounts import Project, ProjectDetails  # noqa: E402
from service.jobs.events import EVENT_TYPES, Event  # noqa: E402
from service.jobs.monitoring.alerts import ShownAlert  # noqa: E402
from service.jobs.records import ApiKey, Artifact, Host, Job, JobPage, QueuePage, StoredFile, Upload  # noqa: E402
from trivet import plugins  # noqa: E402
from trivet.cli.main import program  # noqa: E402

LIST = ROOT / "docs" / "site" / "public.json"
RELEASED = ROOT / "tests" / "released"
READS: Mapping[str, Any] = {
    "/v1/alerts": ShownAlert,
    "/v1/files": Upload,
    "/v1/hosts": Host,
    "/v1/jobs": JobPage,
    "/v1/jobs/{job}": Job,
    "/v1/jobs/{job}/artifacts": Artifact,
    "/v1/keys": ApiKey,
    "/v1/projects": Project,
    "/v1/projects/default": ProjectDetails,
    "/v1/queue": QueuePage,
    "POST /v1/files": StoredFile,
    "POST /v1/jobs": Job,
}
"""What the client makes of the answer to a call, or of each of its ``items``."""
Names = dict[str, list[str]]


def public_names() -> Names:
    """Return every public name of this code, by what it belongs to."""
    found = {
        "commands": _commands(),
        "events": [*(f"type {each}" for each in EVENT_TYPES), *Event.__annotations__],
        "plugins": _members(plugins, plugins.__all__),
        "python": _members(trivet, trivet.__all__),
        "rest": _rest(),
        "specs": [f"{kind}.{path}" for kind in specs.KINDS for path in specs.paths(kind)],
    }
    return {name: sorted(set(names)) for name, names in found.items()}


def vanished(kept: Names, found: Names) -> list[str]:
    """Return the names that were public and are no longer there."""
    return [f"{room}: {name}" for room, names in kept.items() for name in names if name not in set(found.get(room, ()))]


def kept_names() -> Names:
    """Return the list as it is kept."""
    kept: Names = json.loads(LIST.read_text()) if LIST.exists() else {}
    return kept


def _commands() -> Iterator[str]:
    pending: list[tuple[str, Any]] = [("trivet", typer.main.get_group(program()))]
    while pending:
        name, command = pending.pop()
        yield from (f"{name} {option}" for each in command.params for option in each.opts if option.startswith("--"))
        inner = getattr(command, "commands", None)
        pending += [(f"{name} {each}", below) for each, below in (inner or {}).items()]
        if inner is None:
            yield name


def _members(module: Any, names: list[str]) -> Iterator[str]:
    """Yield names of a module, those of the fields and methods of its classes, and of the parameters of these."""
    for name in names:
        yield name
        value = getattr(module, name)
        if not inspect.isclass(value):
            yield from _parameters(name, value)
            continue
        if dataclasses.is_dataclass(value):
            yield from (f"{name}({field.name})" for field in dataclasses.fields(value))
        if issubclass(value, BaseModel):
            yield from (f"{name}.{field}" for field in value.model_fields)
        for owner in value.__mro__:
            if owner.__module__.split(".")[0] in ("service", "trivet"):
                for own in (own for own in vars(owner) if not own.startswith(("_", "model_config", "model_post_init"))):
                    yield f"{name}.{own}"
                    yield from _parameters(f"{name}.{own}", inspect.getattr_static(value, own))


def _parameters(name: str, value: Any) -> Iterator[str]:
    if inspect.isfunction(value):
        yield from (f"{name}({each})" for each in inspect.signature(value).parameters if each != "self")


def _rest() -> Iterator[str]:
    """Yield calls, their parameters, and the fields of all bodies with their types."""
    document = rest.document()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            call = f"{method.upper()} {path}"
            yield call
            yield from (f"{call} {each['in']} {each['name']}" for each in operation.get("parameters", ()))
    for name, schema in document["components"]["schemas"].items():
        yield from (f"{name}.{field}: {_type(each)}" for field, each in schema.get("properties", {}).items())


def _type(schema: Mapping[str, Any]) -> str:
    if forms := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(sorted(map(_type, forms)))
    return str(schema.get("$ref", "").rpartition("/")[2] or schema.get("type", "anything"))


def client_schemas() -> dict[str, Any]:
    """Return how this client reads answers: by call, the JSON Schema of what it makes of one."""
    return {call: TypeAdapter(model).json_schema(mode="validation") for call, model in READS.items()}


def main(words: list[str]) -> None:
    options = argparse.ArgumentParser(description="refresh the list of public names")
    options.add_argument("--drop", nargs="+", default=[], metavar="NAME", help="names that are public no longer")
    options.add_argument("--client", metavar="VERSION", help="keep how the client of this release reads answers")
    chosen = options.parse_args(words)
    found, kept = public_names(), kept_names()
    merged = {room: sorted({*names, *kept.get(room, ())} - set(chosen.drop)) for room, names in found.items()}
    LIST.write_text(json.dumps(merged, indent=0) + "\n")
    if chosen.client:
        RELEASED.mkdir(exist_ok=True)
        (RELEASED / f"{chosen.client}.json").write_text(json.dumps(client_schemas()) + "\n")
    for name in vanished(merged, found):
        sys.stderr.write(f"no longer there: {name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
