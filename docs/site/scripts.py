"""Writes the tables of docs/decisions/scripts.md from the headers of the store's Lua scripts.

python docs/site/scripts.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from service.jobs.store import acl, scripts  # noqa: E402 - which the line before makes importable

PAGE = ROOT / "docs" / "decisions" / "scripts.md"
_LUA = Path(scripts.__file__).with_name("lua")


def needs(library: str) -> list[str]:
    """Return the libraries that must stand before a library, as its header names them."""
    found = re.search(r"\b[Nn]eeds ([\w, ]+?)(?:, and|\.)", _comment(_LUA / "lib" / f"{library}.lua"))
    return [] if found is None else re.findall(r"\w+", found[1].replace(" and ", " "))


def uses(path: Path) -> list[str]:
    """Return the libraries of a script, in the order in which they are loaded."""
    return " ".join(re.findall(r"^-- USES: (.*)$", path.read_text(), re.MULTILINE)).split()


def script_files() -> list[Path]:
    """Return the scripts, by name."""
    return sorted(_LUA.glob("*.lua"))


def tables() -> str:
    """Return both tables: of the scripts, and of the libraries."""
    return "\n".join([*_scripts(), "", *_libraries(), ""])


def _scripts() -> Iterator[str]:
    hosts = {script.name for script in acl.HOST_SCRIPTS}
    api = {script.name for script in acl.API_SCRIPTS}
    yield "| script | does | called by | libraries, in order | keys that it names itself |"
    yield "|---|---|---|---|---|"
    for path in script_files():
        name = path.stem
        called = " and ".join(who for who, names in (("API", api), ("hosts", hosts)) if name in names)
        yield f"| `{name}` | {_sentence(path)} | {called} | {' '.join(uses(path))} | {_keys(path)} |"


def _libraries() -> Iterator[str]:
    yield "| library | holds | needs | keys |"
    yield "|---|---|---|---|"
    for path in sorted((_LUA / "lib").glob("*.lua")):
        yield f"| `{path.stem}` | {_sentence(path)} | {' '.join(needs(path.stem))} | {_keys(path)} |"


def _comment(path: Path) -> str:
    """Return the words at the head of a file, without its name and its declarations."""
    head = path.read_text().partition("\n\n")[0]
    lines = [line.removeprefix("-- ") for line in head.splitlines() if not re.match(r"-- [A-Z]+:", line)]
    return " ".join(line for line in lines if line != path.stem)


def _sentence(path: Path) -> str:
    return re.split(r"(?<=\.) |;", _comment(path), maxsplit=1)[0].rstrip(".").replace("|", "\\|")


def _keys(path: Path) -> str:
    return ", ".join(sorted(set(re.findall(r"\bKEY\.(\w+)", path.read_text()))))


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition("| script |")[0] + tables())
