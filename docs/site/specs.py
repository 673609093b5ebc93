"""Makes the reference of the specs from their JSON Schemas: every field with type, default, meaning and an example."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.jobs.kinds.registry import KINDS as REGISTERED
from service.jobs.spec.common import CommonSpec

Schema = Mapping[str, Any]
ROOT = Path(__file__).parents[2]
KINDS = ("train", "verify", "compile", "run", "script")
"""Those that are built in; a package's own are on the page Specs of the dashboard."""
_DEEPEST = 5
_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "object": "map"}
_LIMITS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
_IDS = {"^job_": "job_…", "^file_": "file_…"}
_BY_TYPE: Mapping[str, Any] = {"string": "a text", "boolean": True, "object": {}, "array": []}


@dataclass(frozen=True)
class _Field:
    """One field of a spec; ``form`` names the form that it belongs to, of several that a value may have."""

    path: str
    form: str
    type: str
    default: str
    words: str
    example: str


def paths(kind: str) -> set[str]:
    """Return the paths of all fields of a kind."""
    root = REGISTERED.declaration(kind).config.model_json_schema()
    return {each.path for each in _fields(root, root, "", "", 0)}


def page(kind: str) -> str:
    """Return the page about a kind, in Markdown."""
    root = REGISTERED.declaration(kind).config.model_json_schema()
    example = ROOT / "examples" / f"{kind}.yaml"
    shown = f"```yaml\n{example.read_text()}```\n" if example.exists() else ""  # a run's program is a package's
    fields = list(_fields(root, root, "", "", 0))
    common = set(CommonSpec.model_fields)
    own = [each for each in fields if each.path.split(".")[0] not in common]
    others = [each for each in fields if each.path.split(".")[0] in common]
    head = f"# Fields of `kind: {kind}`\n\n{_words(root)}\n\n{shown}"
    notes = (
        "\nA field without a default must be given. `…` in a default stands for fields with defaults of their own.\n"
    )
    return f"{head}{notes}\n## Its own fields\n\n{_table(own)}\n## Fields of every kind\n\n{_table(others)}"


def _table(fields: list[_Field]) -> str:
    rows = [
        f"| `{each.path}`{f' ({each.form})' if each.form else ''} | {each.type} | {each.default} | {each.words} "
        f"| {f'`{each.example}`' if each.example else ''} |"
        for each in fields
    ]
    return "\n".join(["| field | type | default | meaning | example |", "|---|---|---|---|---|", *rows, ""])


def _fields(schema: Schema, root: Schema, path: str, form: str, depth: int) -> Iterator[_Field]:
    needed = [*schema.get("required", ()), *schema.get("x-needed", ())]
    for name, given in schema.get("properties", {}).items():
        own = _resolved(given, root)
        forms = list(_forms(own, root))
        place = f"{path}.{name}" if path else name
        types = " or ".join(dict.fromkeys(_type(each, root) for each in forms))
        default = "" if name in needed else _default(own)
        example = _cell(_written(_example(own, root)))
        words = _words(own) or _words(forms[0]) or ("chooses this form" if "const" in own or name == "name" else "")
        yield _Field(place, form, _cell(types), _cell(default), _cell(words), example)
        inner = [each for each in forms if each.get("properties")]
        for each in inner if depth < _DEEPEST else ():
            yield from _fields(each, root, place, _title(each) if len(inner) > 1 else form, depth + 1)


def _resolved(schema: Schema, root: Schema) -> Schema:
    """Return a schema with its reference followed; what stands beside the reference goes first."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    beside = {name: value for name, value in schema.items() if name != "$ref"}
    return {**_resolved(root["$defs"][reference.rpartition("/")[2]], root), **beside}


def _forms(schema: Schema, root: Schema) -> Iterator[Schema]:
    """Yield the forms that a value may have, without null."""
    inner = schema.get("anyOf") or schema.get("oneOf")
    if inner is None:
        if schema.get("type") != "null":
            yield schema
        return
    for each in inner:
        yield from _forms(_resolved(each, root), root)


def _title(schema: Schema) -> str:
    """Return what tells a form apart: its constants, else its first required field."""
    constants = [f"{name}: {each['const']}" for name, each in schema["properties"].items() if "const" in each]
    return ", ".join(constants) or next(iter(schema.get("required", ())), str(schema.get("title", "")))


def _type(schema: Schema, root: Schema) -> str:
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("properties"):
        return "fields"
    if schema.get("type") == "array":
        items = (
            [_type(each, root) for each in _forms(_resolved(schema["items"], root), root)] if "items" in schema else []
        )
        return f"list of {' or '.join(dict.fromkeys(items))}" if items else "list"
    limits = ", ".join(f"{sign} {schema[name]:,}" for name, sign in _LIMITS if name in schema)
    return " ".join(filter(None, (_TYPES.get(schema.get("type", ""), "anything"), limits)))


def _default(schema: Schema) -> str:
    value = schema.get("default")
    if isinstance(value, dict):
        return "…" if value else "none"
    return "none" if value in (None, "", []) else _written(value)


def _example(schema: Schema, root: Schema) -> Any:
    """Return a value that the field may have: an example of the schema's own, the default, or the simplest one."""
    forms = list(_forms(schema, root))
    for each in (schema, *forms):
        if each.get("examples"):
            return each["examples"][0]
    if schema.get("default") not in (None, "", [], {}) and not isinstance(schema.get("default"), dict):
        return schema["default"]
    return _simplest(forms[0], root)


def _simplest(schema: Schema, root: Schema) -> Any:
    if "const" in schema or "enum" in schema:
        return schema.get("const", next(iter(schema.get("enum", ())), None))
    if schema.get("properties"):
        needed = schema.get("required", ())
        return {name: _example(_resolved(schema["properties"][name], root), root) for name in needed}
    if schema.get("type") == "array" and "items" in schema:
        return [_example(_resolved(schema["items"], root), root)]
    if schema.get("type") in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        return max(least, 1) if schema.get("maximum", 1) >= 1 and schema.get("exclusiveMaximum", 2) > 1 else 0.5
    for beginning, example in _IDS.items():
        if str(schema.get("pattern", "")).startswith(beginning):
            return example
    return _BY_TYPE.get(schema.get("type", ""), 1)


def _written(value: Any) -> str:
    """Return a value as YAML would have it on one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_written(each)}" for name, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value)


def _words(schema: Schema) -> str:
    return " ".join(str(schema.get("description", "")).replace("``", "`").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
