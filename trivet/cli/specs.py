"""Specs from files, and changes to them from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from trivet.errors import TrivetError


class _SpecError(TrivetError):
    """A spec file or a ``--set`` that cannot be read."""


def load(source: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the spec in a YAML or JSON file (``-``: standard input), with ``path=value`` changes applied."""
    spec = _parse(source)
    for change in changes:
        apply(spec, change)
    _check_json(spec, "")
    return spec


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


def _parse(source: str) -> dict[str, Any]:
    text = sys.stdin.read() if source == "-" else _read(Path(source))
    try:
        spec = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _SpecError(f"{source} is neither YAML nor JSON: {error}") from None
    if not isinstance(spec, dict):
        raise _SpecError(f"{source} holds {_kind(spec)}; a spec is a mapping such as 'kind: train'")
    return spec


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _SpecError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _check_json(value: Any, path: str) -> None:
    """Refuse values of YAML that JSON, in which a spec travels, does not have. Raises :class:`_SpecError` with the
    field.
    """
    if isinstance(value, dict):
        for name, each in value.items():
            if not isinstance(name, str):
                raise _SpecError(f"{path or 'the spec'} has the field {name!r}; the name of a field is text")
            _check_json(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _check_json(each, f"{path}.{index}")
    elif isinstance(value, float) and not isfinite(value):
        raise _SpecError(f"{path} is {value}; expected a finite number")
    elif not isinstance(value, (str, int, float, NoneType)):
        raise _SpecError(f"{path} is a {type(value).__name__} of YAML; expected text, a number, true, false or null")


def _enter(target: Any, name: str, path: str) -> Any:
    if isinstance(target, dict):
        return _fresh(target, name) if target.get(name) is None else target[name]
    if isinstance(target, list):
        return target[_index(target, name, path)]
    raise _SpecError(f"--set {path}: there is {_kind(target)} before '{name}', and that has no parts")


def _fresh(target: dict[str, Any], name: str) -> dict[str, Any]:
    target[name] = {}
    made: dict[str, Any] = target[name]
    return made


def _assign(target: Any, name: str, value: Any, path: str) -> None:
    if isinstance(target, dict):
        target[name] = value
    elif isinstance(target, list):
        target[_index(target, name, path)] = value
    else:
        raise _SpecError(f"--set {path}: there is {_kind(target)} before '{name}', and that has no parts")


def _index(items: list[Any], name: str, path: str) -> int:
    if not name.isdigit() or int(name) >= len(items):
        raise _SpecError(f"--set {path}: {name!r} is not a position in a list of {len(items)}; count from 0")
    return int(name)


def _value(change: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _SpecError(f"--set {change!r}: the value is not YAML: {error}") from None


def _kind(value: Any) -> str:
    return {type(None): "nothing", list: "a list", str: "text"}.get(type(value), f"the value {value!r}")
