"""Shows everything that a spec can name."""

from __future__ import annotations

import re

import typer

from trivet.cli.context import JsonFlag, add_commands, client, err, out, print_json, table


def register(app: typer.Typer) -> None:
    add_commands(app, kinds)


def kinds(as_json: JsonFlag = False) -> None:
    """List kinds of jobs, and what they can name: model families, data sources, objectives, optimizers and so on."""
    with client() as service:
        found = service.kinds()
    if as_json:
        print_json(found.model_dump(mode="json", by_alias=True))
        return
    rows = table("what", "name", "package", "description")
    for kind in found.items:
        rows.add_row("kind", kind.kind, f"{kind.distribution} {kind.version}", _first_sentence(kind.description))
    named = (
        ("family", found.families),
        ("source", found.sources),
        ("objective", found.objectives),
        ("optimizer", found.optimizers),
        ("schedule", found.schedules),
        ("program", found.programs),
    )
    for what, choices in named:
        for each in choices:
            rows.add_row(what, each.name, f"{each.distribution} {each.version}", _first_sentence(each.description))
    out.print(rows)
    for broken in found.unavailable:
        package = f"{broken.distribution} {broken.version}"
        err.block(f"unavailable: {broken.group} {broken.name} of {package}: {broken.reason}", style="red", indent=2)


def _first_sentence(description: str) -> str:
    """Return the beginning of a docstring, in one line and without its marks."""
    paragraph = " ".join(description.partition("\n\n")[0].split()).replace("`", "")
    return re.split(r"(?<=[.;]) |: \{", paragraph, maxsplit=1)[0].rstrip(";.") + "."
