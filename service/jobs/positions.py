"""Finds the place of a field in a YAML or JSON file, so that a refusal can point at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import yaml

from service.jobs import documents

Position = tuple[int, int]
"""A line and a column, both counted from 1."""


def positions(text: str) -> dict[str, Position]:
    """Return the position of every field, by its path (``model.hidden.0``); the spec itself has the path ``""``.

    Nothing of JSON that is no YAML, for all its depth, is found.
    """
    try:
        root = documents.compose(text)
    except (yaml.YAMLError, RecursionError):
        return {}
    return {} if root is None else dict(_fields(root, "", root))


def nearest(known: Mapping[str, Position], path: str) -> Position | None:
    """Return the place of the field, or of the closest field around it, if it is missing."""
    while path and path not in known:
        path = path.rpartition(".")[0]
    return known.get(path)


def _fields(node: yaml.Node, path: str, place: yaml.Node) -> Iterator[tuple[str, Position]]:
    """Yield the paths of a node and of all within it. ``place`` is what to point at: the name of a field rather than
    its value.
    """
    mark = place.start_mark
    yield path, (mark.line + 1, mark.column + 1)
    prefix = f"{path}." if path else ""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode):
                yield from _fields(value, f"{prefix}{name.value}", name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _fields(value, f"{prefix}{index}", value)
