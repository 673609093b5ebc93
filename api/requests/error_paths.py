"""Translates pydantic's error locations to the paths that a user wrote.

Pydantic names every union member it passed through (``train``, ``model``, ``family``, ``mlp``, ``hidden``, ``0``);
a user knows ``model.hidden.0``. The validator's own schema says which elements are fields and which are tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Schema = Mapping[str, Any]
Location = Sequence[str | int]

_FIELD_KEYS = ("validation_alias", "alias")


@dataclass(frozen=True)
class ErrorPlace:
    """The place of an error: the user's path, the fields beside its last element, and those below it."""

    path: tuple[str, ...] = ()
    siblings: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    def enter(self, name: str | int, siblings: Iterable[str] = ()) -> ErrorPlace:
        return replace(self, path=(*self.path, str(name)), siblings=tuple(siblings))


class Locator:
    """Translates the locations of one validator."""

    def __init__(self, schema: Schema) -> None:
        self._definitions: dict[str, Schema] = {}
        if schema["type"] == "definitions":
            self._definitions = {definition["ref"]: definition for definition in schema["definitions"]}
            schema = schema["schema"]
        self._root = schema

    def locate(self, location: Location) -> ErrorPlace:
        place, schemas = ErrorPlace(), [self._root]
        for element in location:
            place, schemas = self._step(place, schemas, element)
        return replace(place, fields=tuple(dict.fromkeys(self._below(schemas))))

    def _below(self, schemas: Iterable[Schema]) -> Iterator[str]:
        """Yield the fields of every type that may be here, through unions."""
        for schema in map(self._unwrap, schemas):
            if schema["type"] == "tagged-union":
                yield from self._below(schema["choices"].values())
            elif schema["type"] == "union":
                yield from self._below(_choices(schema))
            else:
                yield from (name for name, _ in _fields(schema))

    def _step(self, place: ErrorPlace, schemas: list[Schema], element: str | int) -> tuple[ErrorPlace, list[Schema]]:
        """Go one element further. ``schemas`` are the candidates here: several below an untagged union, none if
        the path is lost.
        """
        candidates = [self._unwrap(schema) for schema in schemas]
        if not candidates:
            return place.enter(element), []
        first = candidates[0]
        if first["type"] == "tagged-union":
            return place, [first["choices"][element]] if element in first["choices"] else []
        if first["type"] == "union":
            return place, _choices(first)
        fields = {name: field for schema in candidates for name, field in _fields(schema)}
        if fields:
            chosen = fields.get(str(element))
            return place.enter(element, fields), [] if chosen is None else [chosen]
        return self._step_into_container(place, candidates, element)

    def _step_into_container(
        self, place: ErrorPlace, candidates: list[Schema], element: str | int
    ) -> tuple[ErrorPlace, list[Schema]]:
        if any(schema["type"] in ("list", "tuple", "set", "dict") for schema in candidates):
            if element == "[key]":
                return place, []
            return place.enter(element), [item for schema in candidates for item in _items(schema)]
        return (place, []) if isinstance(element, str) else (place.enter(element), [])

    def _unwrap(self, schema: Schema) -> Schema:
        """Return the type below wrappers that add no element to a location."""
        while True:
            if schema["type"] == "definition-ref":
                schema = self._definitions[schema["schema_ref"]]
            elif schema["type"] == "model-fields" or "schema" not in schema:
                return schema
            else:
                schema = schema["schema"]


def _choices(union: Schema) -> list[Schema]:
    return [choice[0] if isinstance(choice, tuple) else choice for choice in union["choices"]]


def _fields(schema: Schema) -> Iterable[tuple[str, Schema]]:
    if schema["type"] != "model-fields":
        return
    for name, field in schema["fields"].items():
        alias = next((field[key] for key in _FIELD_KEYS if isinstance(field.get(key), str)), name)
        yield alias, field["schema"]


def _items(schema: Schema) -> list[Schema]:
    found = schema.get("items_schema") or schema.get("values_schema") or []
    return list(found) if isinstance(found, list) else [found]
