"""Names stand for one thing, and docstrings are whole: none begins as if its first words stood somewhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("api", "service", "trivet", "workers")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FRAGMENT = re.compile(r"(Of|The same|From|Between|Like|Without|Within|At|Beside|Behind|Those|Into|Until) ")
WHOLE, FRAGMENTARY = '"""Return the middle of x."""', '"""Of the middle of x."""'


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield those of the module, of its classes and functions, and of the variables that a string follows."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        for variable, text in pairwise(body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(variable, ast.Assign | ast.AnnAssign) and is_text and isinstance(text.value.value, str):
                yield text.value.value


def fragments(tree: ast.Module) -> list[str]:
    return [text.splitlines()[0] for text in docstrings(tree) if FRAGMENT.match(text)]


@cache
def read(path: Path) -> tuple[list[str], list[str]]:
    """Return a file's docstrings that are fragments, and its classes. To keep trees takes longer than to make them."""
    tree = ast.parse(path.read_text())
    return fragments(tree), [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_no_docstring_is_a_fragment() -> None:
    assert [f"{path.relative_to(ROOT)}: {text}" for path in FILES for text in read(path)[0]] == []


def test_the_name_of_a_class_stands_for_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for name in read(path)[1]:
            homes.setdefault(name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("place", ["{}", "class A:\n    {}", "def f() -> None:\n    {}", "x = 1\n{}", "x: int = 1\n{}"])
def test_a_fragment_is_found_wherever_it_stands(place: str) -> None:
    assert len(fragments(ast.parse(place.format(FRAGMENTARY)))) == 1
    assert fragments(ast.parse(place.format(WHOLE))) == []
