"""No file imports one that imports it, in a function or for types either, and no room of the jobs or the API does."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("api", "service", "trivet", "workers")


@cache
def imports() -> frozenset[tuple[str, str]]:
    """Return the files that each file imports, wherever in it."""
    paths = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    files = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    edges = set()
    for path in paths:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [module if module in files else str(node.module) for module in modules]
            edges |= {(str(path), str(files[name])) for name in names if files.get(name, path) != path}
    return frozenset(edges)


def circle(edges: frozenset[tuple[str, str]]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for importer, imported in edges:
        graph.setdefault(importer, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_imports_one_that_imports_it() -> None:
    assert circle(imports()) == []


@pytest.mark.parametrize("house", ["service/jobs", "api"])
def test_no_room_imports_one_that_imports_it(house: str) -> None:
    within = [edge for edge in imports() if all(path.startswith(house + "/") for path in edge)]
    rooms = {(str(Path(importer).parent), str(Path(imported).parent)) for importer, imported in within}
    assert circle(frozenset(room for room in rooms if room[0] != room[1])) == []


def test_a_circle_is_found() -> None:
    assert set(circle(frozenset({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}))) == {"a", "b", "c"}
