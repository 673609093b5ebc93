"""Reads specs from files, and changes them from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from service.jobs.text import documents
from service.jobs.text.documents import Position, nearest, positions
from trivet.errors import Refused, TrivetError


class _SpecError(TrivetError):
    """A spec file or a ``--set`` that cannot be read."""


@dataclass(frozen=True)
class SpecFile:
    """A spec, with the place of each of its fields."""

    spec: dict[str, Any]
    source: str
    fields: Mapping[str, Position]
    changed: Sequence[str]
    """Paths that ``--set`` changed, the last one first."""

    def place(self, path: str) -> str:
        """Return where a field was given: ``train.yaml:12:3``, or ``--set``; for a missing field, where it belongs."""
        if any(path == each or path.startswith(f"{each}.") for each in self.changed):
            return "--set"
        if path not in self.fields and any(each.startswith(f"{path}.") for each in self.changed):
            return "--set"  # which made the mapping around what it names
        found = nearest(self.fields, path)
        return "" if found is None else f"{self.source}:{found[0]}:{found[1]}"

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Add the place to each field that the service refuses within this context."""
        try:
            yield
        except Refused as error:
            errors = [{**_offer_upload(each), "at": self.place(each["path"])} for each in error.errors]
            raise Refused(error.status, error.title, error.detail, errors) from error


def _offer_upload(refused: Mapping[str, Any]) -> Mapping[str, Any]:
    """If a field needs a file's id but got a path, say how to upload the file in the same command."""
    got = refused.get("got")
    if not (isinstance(got, str) and "trivet upload" in refused["message"] and Path(got).is_file()):
        return refused
    return {**refused, "expected": f"{refused['expected']}; --set {refused['path']}=@{got} uploads it"}


def load(source: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the spec in a YAML or JSON file (``-``: standard input), with ``path=value`` changes applied."""
    return read(source, changes).spec


def read(source: str, changes: Sequence[str] = ()) -> SpecFile:
    """Read a spec as :func:`load` does, and keep where its fields are."""
    text = _text(source)
    return _change_spec(source, _mapping(source, _parse(source, text)), positions(text), changes)


def read_batch(source: str, changes: Sequence[str] = ()) -> list[SpecFile]:
    """Read a YAML or JSON file that holds a list of specs, with the changes applied to each."""
    text = _text(source)
    items = _parse(source, text)
    if not isinstance(items, list) or not items:
        raise _SpecError(f"{source} holds {_kind(items)}; a batch is a list of specs")
    fields: list[dict[str, Position]] = [{} for _ in items]
    for path, position in positions(text).items():
        index, _, rest = path.partition(".")
        if index.isdigit():
            fields[int(index)][rest] = position
    return [
        _change_spec(source, _mapping(f"{source}, item {index},", item), fields[index], changes)
        for index, item in enumerate(items)
    ]


@contextmanager
def blamed_batch(files: Sequence[SpecFile]) -> Iterator[None]:
    """Add the place to each field of a batch that the service refuses within this context."""
    try:
        yield
    except Refused as error:
        errors = [{**each, "at": _place_in_batch(files, each["path"])} for each in error.errors]
        raise Refused(error.status, error.title, error.detail, errors) from error


def _place_in_batch(files: Sequence[SpecFile], path: str) -> str:
    index, _, rest = path.removeprefix("jobs.").partition(".")
    return files[int(index)].place(rest) if index.isdigit() and int(index) < len(files) else ""


def _change_spec(source: str, spec: dict[str, Any], fields: Mapping[str, Position], changes: Sequence[str]) -> SpecFile:
    try:
        spec = _without_sharing(spec) if changes else spec
        for change in changes:
            apply(spec, change)
        documents.check_json(spec, "")
    except documents.NotJsonError as error:
        raise _SpecError(str(error)) from None
    except RecursionError:
        raise _SpecError(f"{source} is nested too deeply") from None
    named = "standard input" if source == "-" else Path(source).name
    return SpecFile(spec, named, fields, [change.partition("=")[0] for change in reversed(changes)])


def _without_sharing(value: Any) -> Any:
    """Return a copy that has what YAML's aliases repeat once for each place: a change of one is none of the others."""
    if isinstance(value, dict):
        return {name: _without_sharing(each) for name, each in value.items()}
    return [_without_sharing(each) for each in value] if isinstance(value, list) else value


def apply(spec: dict[str, Any], change: str) -> None:
    """Set one value: ``optimizer.lr=0.01``, ``model.hidden.0=128``, ``labels.team=a``; the value is YAML."""
    path, equals, text = change.partition("=")
    if not equals or not path:
        raise _SpecError(f"--set {change!r}: write path=value, such as steps=100 or optimizer.lr=0.01")
    *parents, last = path.split(".")
    target: Any = spec
    for depth, name in enumerate(parents):
        target = _enter(target, name, ".".join(parents[: depth + 1]))
    _assign(target, last, _value(change, text), path)


def _text(source: str) -> str:
    try:
        return documents.decoded(sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        advice = _advice(source) if isinstance(error, FileNotFoundError) else ""
        raise _SpecError(f"cannot read {source}: {getattr(error, 'strerror', None) or error}{advice}") from None


def _advice(source: str) -> str:
    """Return advice for a missing spec file."""
    if (example := Path("examples", Path(source).name)).is_file():
        return f"; did you mean {example}?"
    kind = next((kind for kind in ("train", "verify", "compile") if kind in Path(source).name), "train")
    return f"; `trivet init {kind}` writes a first one"


def _parse(source: str, text: str) -> Any:
    try:
        return documents.parse(text)
    except documents.ExpansionError as error:
        raise _SpecError(f"{source} {error}") from None
    except yaml.YAMLError as error:
        raise _SpecError(f"{source} is neither YAML nor JSON: {documents.reason(error)}") from None
    except RecursionError:
        raise _SpecError(f"{source} is nested too deeply") from None


def _mapping(source: str, spec: Any) -> dict[str, Any]:
    if not isinstance(spec, dict):
        raise _SpecError(f"{source} holds {_kind(spec)}; a spec is a mapping such as 'kind: train'")
    return spec


def _enter(target: Any, name: str, path: str) -> Any:
    if isinstance(target, dict):
        if target.get(name) is None:
            target[name] = {}
        return target[name]
    if isinstance(target, list):
        return target[_index(target, name, path)]
    raise _no_parts(target, name, path)


def _assign(target: Any, name: str, value: Any, path: str) -> None:
    if isinstance(target, dict):
        target[name] = value
    elif isinstance(target, list):
        target[_index(target, name, path)] = value
    else:
        raise _no_parts(target, name, path)


def _no_parts(target: Any, name: str, path: str) -> _SpecError:
    return _SpecError(f"--set {path}: there is {_kind(target)} before '{name}', and that has no parts")


def _index(items: list[Any], name: str, path: str) -> int:
    if not name.isdigit() or int(name) >= len(items):
        raise _SpecError(f"--set {path}: {name!r} is not a position in a list of {len(items)}; count from 0")
    return int(name)


def _value(change: str, text: str) -> Any:
    try:
        return documents.parse(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise _SpecError(f"--set {change[:200]!r}: the value is not YAML: {error}") from None


def _kind(value: Any) -> str:
    return {type(None): "nothing", list: "a list", dict: "a mapping", str: "text"}.get(
        type(value), f"the value {value!r}"
    )
