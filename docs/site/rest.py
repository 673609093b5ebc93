"""Makes the reference of the REST interface from the OpenAPI document."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from api.main import create_app
from service.jobs.settings import Settings

_HEAD = """# REST interface

Every call takes `Authorization: Bearer KEY`, and answers JSON unless it says otherwise. Refusals are problems of
[RFC 9457](https://www.rfc-editor.org/rfc/rfc9457), with `errors` that name fields. `/openapi.json` of a service has all
of it for generators of clients, and its page `/docs` lets you try each call.

```console
$ curl --silent --header "Authorization: Bearer $TRIVET_KEY" $TRIVET_URL/v1/jobs?limit=3
```
"""


def page() -> str:
    """Return the page about all calls, in Markdown."""
    sections: dict[str, list[str]] = defaultdict(list)
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            sections[operation["tags"][0]].append(_call(path, method, operation))
    return _HEAD + "".join(f"\n## {tag.capitalize()}\n{''.join(calls)}" for tag, calls in sections.items())


def document() -> dict[str, Any]:
    """Return the document of a service that is never started."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data=Path(folder), redis_url=SecretStr("redis://localhost:1"))
        return create_app(settings).openapi()


def _call(path: str, method: str, operation: Mapping[str, Any]) -> str:
    lines = [f"\n### `{method.upper()} {path}`\n", f"\n{' '.join(operation['description'].split())}\n"]
    if body := operation.get("requestBody"):
        lines.append(f"\nTakes {_content(body)}.\n")
    if parameters := operation.get("parameters"):
        lines += ["\n| parameter | in | meaning |\n|---|---|---|\n", *map(_parameter, parameters)]
    answers = [(status, each) for status, each in operation["responses"].items() if status < "400"]
    lines += [f"\nAnswers {status}: {_content(each) or each['description']}.\n" for status, each in answers]
    return "".join(lines)


def _parameter(told: Mapping[str, Any]) -> str:
    needed = ", required" if told.get("required") and told["in"] != "path" else ""
    words = " ".join(told["description"].split()).replace("|", "\\|")
    return f"| `{told['name']}` | {told['in']}{needed} | {words} |\n"


def _content(told: Mapping[str, Any]) -> str:
    """Return the media types of a body with the names of their schemas."""
    found = []
    for media_type, each in told.get("content", {}).items():
        name = each.get("schema", {}).get("$ref", "").rpartition("/")[2]
        found.append(f"`{media_type}`" + (f" ({name})" if name else ""))
    return " or ".join(found)
