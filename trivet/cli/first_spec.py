"""Writes a first spec: an example that runs, followed by every field that it leaves at its default, as comments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

EXAMPLES = Path(__file__).parent.parent / "examples"
"""A link to the checkout's folder; in an installation, the files themselves."""
KINDS = ("train", "verify", "compile")
_WIDTH = 100


def first_spec(kind: str) -> str:
    """Return the example of a kind and, as comments, the other fields of its spec: default and meaning."""
    from service.jobs.kinds.registry import KINDS as REGISTERED  # noqa: PLC0415 - brings every spec

    text = (EXAMPLES / f"{kind}.yaml").read_text()
    given = yaml.safe_load(text)
    comments = _comments(REGISTERED.declaration(kind).config, given)
    return f"{text}\n# Further fields, each with its default. To set one, take the '# ' away.\n{comments}"


def _comments(spec: type[BaseModel], given: dict[str, Any]) -> str:
    lines = (
        line
        for name, field in spec.model_fields.items()
        if (field.alias or name) not in given and field.alias != "kind" and name != "kind"
        for line in _comment(field.alias or name, field)
    )
    return "".join(f"# {line}\n" for line in lines)


def _comment(name: str, field: FieldInfo) -> Iterator[str]:
    if field.description:
        yield from (f"# {line}" for line in wrap(field.description, _WIDTH))
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        yield f"{name}:"
        return
    shown = default.model_dump(mode="json", by_alias=True) if isinstance(default, BaseModel) else default
    flow = yaml.safe_dump([shown], sort_keys=False, default_flow_style=True, width=10_000).strip()
    yield f"{name}: {flow[1:-1]}"
