"""Writes a first spec: an example that runs, and as comments what its fields may be and every other field.

What is said of a field is read from the JSON Schema of its kind: its description, its choices, and the parts of each
form that it may have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

EXAMPLES = Path(__file__).parent.parent / "examples"
"""A link to the checkout's folder; in an installation, the files themselves."""
_WIDTH = 100
_FIELDS = "Further fields, each with its default. To set one, take the '# ' away."
Schema = Mapping[str, Any]


def first_spec(kind: str) -> str:
    """Return the example of a kind and, as comments, what its fields may be, and the other fields with defaults."""
    from service.jobs.kinds.registry import KINDS as REGISTERED  # noqa: PLC0415 - brings every spec

    spec: type[BaseModel] = REGISTERED.declaration(kind).config
    text = (EXAMPLES / f"{kind}.yaml").read_text()
    given = yaml.safe_load(text)
    explained = _Explained(spec.model_json_schema(by_alias=True))
    fields = {field.alias or name: field for name, field in spec.model_fields.items() if name != "kind"}
    own = [line for name in fields if name in given for line in explained.field(name)]
    others = [line for name in fields if name not in given for line in _with_default(name, fields[name], explained)]
    return "\n".join([text, "# The fields above:", *map(_comment, own), "", f"# {_FIELDS}", *map(_comment, others), ""])


def _comment(line: str) -> str:
    return f"# {line}".rstrip()


def _with_default(name: str, field: FieldInfo, explained: _Explained) -> Iterator[str]:
    """Yield what a field means, as a comment, and the line that sets it to its default."""
    yield from (_comment(line) for line in explained.field(name))
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        yield f"{name}:"
        return
    shown = default.model_dump(mode="json", by_alias=True) if isinstance(default, BaseModel) else default
    flow = yaml.safe_dump([shown], sort_keys=False, default_flow_style=True, width=10_000).strip()
    yield f"{name}: {flow[1:-1]}"


class _Explained:
    """Explains the fields of a schema in lines; the parts of each form once, where it is first."""

    def __init__(self, schema: Schema) -> None:
        self._properties = schema["properties"]
        self._forms = schema.get("$defs", {})
        self._told: set[str] = set()

    def field(self, name: str) -> Iterator[str]:
        """Yield what a field of the spec means, its choices, and their parts."""
        yield from self._value(name, self._properties[name], "")

    def _value(self, name: str, schema: Schema, margin: str) -> Iterator[str]:
        choices, forms = self._choices(schema)
        said = [text for text in (schema.get("description"), choices) if text]
        yield from _paragraph(f"{name}: {'; '.join(said)}" if said else name, margin)
        for form in forms:
            yield from self._form(form, margin + "  ", alone=len(forms) == 1)

    def _form(self, name: str, margin: str, *, alone: bool) -> Iterator[str]:
        """Yield the parts of a form, after its shape if the field may have others."""
        form = self._forms[name]
        parts = form.get("properties", {})
        if not alone:
            shape = ", ".join(f"{part}: {_constant(each)}" if _constant(each) else part for part, each in parts.items())
            first = " ".join(form.get("description", "").partition("\n\n")[0].split())
            yield from _paragraph(f"{{{shape}}}: {first}" if first else f"{{{shape}}}", margin)
            margin += "  "
        if name.removesuffix("WithFile") in self._told:
            return
        self._told.add(name)
        for part, schema in parts.items():
            if not _constant(schema):
                yield from self._value(part, schema, margin)

    def _choices(self, schema: Schema) -> tuple[str, list[str]]:
        """Return the words that a value may be, as part of a sentence, and the names of the forms that it may have."""
        words: list[str] = []
        forms: list[str] = []
        self._collect(schema, words, forms)
        several = list(dict.fromkeys(words))
        return (f"one of {', '.join(several)}" if len(several) > 1 else ""), list(dict.fromkeys(forms))

    def _collect(self, schema: Schema, words: list[str], forms: list[str]) -> None:
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            if "properties" in self._forms[name]:
                forms.append(name)
            else:
                self._collect(self._forms[name], words, forms)
        words += [str(value) for value in schema.get("enum", ())]
        if (constant := _constant(schema)) is not None:
            words.append(constant)
        inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("prefixItems", ())]
        items = schema.get("items")
        for each in [*inner, *([items] if isinstance(items, Mapping) else [])]:
            self._collect(each, words, forms)


def _constant(schema: Schema) -> str | None:
    return None if schema.get("const") is None else str(schema["const"])


def _paragraph(text: str, margin: str) -> Iterator[str]:
    below = margin + "    "
    yield from wrap(
        text.replace("``", "`"), _WIDTH, initial_indent=margin, subsequent_indent=below, break_on_hyphens=False
    )
