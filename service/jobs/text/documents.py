"""Reads and writes documents by the rules of JSON and of YAML 1.2, in whose core schema ``no`` is text.

PyYAML alone reads YAML 1.1: there ``no``, ``on`` and ``1:30`` are not text, a tab does not separate tokens, and a
character of JSON's ``\\ud83d\\ude82`` is two. Positions of fields let a refusal point into a file.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from types import NoneType
from typing import Any

import yaml

_CORE = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", "<<", "<"),
)
"""The core schema of YAML 1.2.2 (section 10.3.2): each tag with its form and its first characters; and merging,
for anchors.
"""
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_TAB = r"'\t'"
"""The name of a tab in PyYAML's errors."""
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


_MOST_VALUES = 1_000_000


class NotJsonError(ValueError):
    """A document has a value that JSON, the form in which specs travel, does not have."""


class ExpansionError(yaml.YAMLError):
    """Aliases expand a document beyond the limit, or make a value contain itself."""


class _CoreLoader(yaml.SafeLoader):
    """Reads YAML by the core schema of version 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own form

    def scan_to_next_token(self) -> None:
        """Skip separators between tokens, including tabs, except where they would indent a block."""
        if self.index == 0 and self.peek() == "\ufeff":
            self.forward()
        indents = self.column == 0
        while True:
            while self.peek() == " " or (self.peek() == "\t" and (self.flow_level or not indents)):
                self.forward()
            if self.peek() == "#":
                while self.peek() not in "\0\r\n\x85\u2028\u2029":
                    self.forward()
            if not self.scan_line_break():  # type: ignore[no-untyped-call]
                return
            indents = True
            if not self.flow_level:
                self.allow_simple_key = True

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return a node's value. A text that is not of its tag, as in ``!!bool maybe``, is an error with a place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:
            why = f": {error}" if isinstance(error, ValueError) else ""
            problem = f"{str(node.value)[:40]!r} is not of the tag {node.tag}{why}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base) if base == 10 else int(text[2:], base)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        text = str(self.construct_scalar(node)).lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        return _SURROGATES.sub(_join_surrogates, str(self.construct_scalar(node)))


class _CoreDumper(yaml.SafeDumper):
    """Writes YAML that version 1.1 and the core schema of version 1.2 read alike."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own form
        first: list(resolvers) for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


for _name, _form, _first in _CORE:
    for _kind in (_CoreLoader, _CoreDumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_form})\Z"), list(_first))
for _name in ("int", "float", "str"):
    _CoreLoader.add_constructor(f"tag:yaml.org,2002:{_name}", getattr(_CoreLoader, f"construct_yaml_{_name}"))


def _join_surrogates(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


def decoded(content: bytes) -> str:
    """Return the text of a file: UTF-8, or the encoding of its byte order mark. Raises ``UnicodeDecodeError``."""
    encoding = next((name for mark, name in _BOMS if content.startswith(mark)), "utf-8")
    return content.decode(encoding)


def parse(text: str) -> Any:
    """Return the value of a JSON or YAML text. Raises ``yaml.YAMLError`` for any other text."""
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError):
        return parse_yaml(text)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is there twice")  # which the reader of YAML says with its place
    return found


def parse_yaml(text: str) -> Any:
    """Return the value of a text of YAML. Raises ``yaml.YAMLError``, :class:`ExpansionError` among them."""
    _compose(text)
    return yaml.load(text, Loader=_CoreLoader)  # noqa: S506 - a SafeLoader


def _compose(text: str) -> yaml.Node | None:
    """Return the nodes of a text, with their places. Raises like :func:`parse_yaml`."""
    node: yaml.Node | None = yaml.compose(text, Loader=_CoreLoader)
    if node is not None and _values(node, {}) > _MOST_VALUES:
        raise ExpansionError(f"has aliases that expand to more than {_MOST_VALUES:,} values")
    return node


def reason(error: yaml.YAMLError) -> str:
    """Return why a text is not YAML, with the place, and a hint for a common mistake."""
    return f"{error}{_hint(error)}"


def short_reason(error: yaml.MarkedYAMLError) -> str:
    """Return :func:`reason` without the place."""
    return f"{error.problem or error.context or error}{_hint(error)}"


def _hint(error: yaml.YAMLError) -> str:
    return "; indent YAML with spaces, not with a tab" if _TAB in str(error) else ""


def check_json(value: Any, path: str) -> None:
    """Refuse values of YAML that JSON does not have. Raises :class:`NotJsonError` with the field."""
    if isinstance(value, dict):
        for name, each in value.items():
            if not isinstance(name, str):
                raise NotJsonError(f"{path or 'the spec'} has the field {name!r}; a field's name must be text")
            check_json(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            check_json(each, f"{path}.{index}")
    elif isinstance(value, float) and not isfinite(value):
        raise NotJsonError(f"{path} is {value}; expected a finite number")
    elif not isinstance(value, (str, int, float, NoneType)):
        raise NotJsonError(f"{path} is a {type(value).__name__} of YAML; expected text, a number, true, false or null")


_MERGE = "tag:yaml.org,2002:merge"


def _values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return the number of values of a node, with aliases expanded. ``known`` has the numbers of counted nodes,
    and ``None`` for the nodes around this one.
    """
    if id(node) in known:
        if (count := known[id(node)]) is None:
            raise ExpansionError("has an alias that refers to a value around it")
        return count
    known[id(node)] = None
    inside: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inside = [each for pair in node.value for each in pair]
        _check_names([name for name, _ in node.value if isinstance(name, yaml.ScalarNode) and name.tag != _MERGE])
    elif isinstance(node, yaml.SequenceNode):
        inside = node.value
    known[id(node)] = count = 1 + sum(_values(each, known) for each in inside)
    return count


def _check_names(names: list[yaml.ScalarNode]) -> None:
    """Refuse a field that is there twice: PyYAML takes the last one without a word."""
    seen: set[tuple[str, str]] = set()
    for name in names:
        if (name.tag, name.value) in seen:
            raise yaml.MarkedYAMLError(problem=f"the field {name.value!r} is there twice", problem_mark=name.start_mark)
        seen.add((name.tag, name.value))


def _written_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Escape characters that YAML 1.1 treats as the end of a line and folds into a blank."""
    style = '"' if any(sign in text for sign in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_CoreDumper.add_representer(str, _written_text)


def dump(value: Any) -> str:
    """Return a value as YAML, in the order of its fields."""
    written: str = yaml.dump(value, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True)
    return written


Position = tuple[int, int]
"""A line and a column, both counted from 1."""


def positions(text: str) -> dict[str, Position]:
    """Return the position of every field, by its path (``model.hidden.0``); the spec itself has the path ``""``.

    JSON that is nested too deeply for YAML gives none.
    """
    try:
        root = _compose(text)
    except (yaml.YAMLError, RecursionError):
        return {}
    return {} if root is None else dict(_fields(root, "", root))


def nearest(known: Mapping[str, Position], path: str) -> Position | None:
    """Return the place of the field, or of the closest field around it, if it is missing."""
    while path and path not in known:
        path = path.rpartition(".")[0]
    return known.get(path)


def _fields(node: yaml.Node, path: str, place: yaml.Node) -> Iterator[tuple[str, Position]]:
    """Yield the paths of a node and of all nodes within it. ``place`` is the position to point at: the name of
    a field rather than its value.
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
