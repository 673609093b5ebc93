"""One place marks steps, one compiles, and whatever may be compiled is called across the boundary."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for room in ("service", "workers", "api", "trivet") for path in (ROOT / room).rglob("*.py")]
MARKING = {"service/parallel/boundary/step.py"}
WATCHING = {"service/compilation/instruments/marks.py", "service/torch_internals/table.py"}
"""The first wraps the mark while a program is checked, to see who sets it; the second only lists its name."""
COMPILING = {"service/models/compiled.py", "service/compilation/instruments/toolchain.py"}
"""The second compiles a function of its own, to have the compiler started."""
CALLING = ("service/training/", "service/parallel/pipeline/", "service/compilation/")
"""Rooms that may hold compiled modules."""
HOLDERS = {"model", "module", "stage", "stages", "modules", "scorer"}
"""What such rooms call the modules, or the mappings, that they hold."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def marks_in(source: str) -> Iterator[int]:
    """Lines that name the step mark."""
    if "mark_step_begin" not in source:
        return
    for node in nodes_of(source):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        names += [node.id] if isinstance(node, ast.Name) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom | ast.Import) else []
        names += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
        if any(name.split(".")[-1] in {"cudagraph_mark_step_begin", "mark_step_begin"} for name in names):
            yield getattr(node, "lineno", 0)


def compilations_in(source: str) -> Iterator[int]:
    """Lines that call a method ``compile``, or name that of torch; ``re.compile`` is another matter."""
    if "compile" not in source:
        return
    for node in nodes_of(source):
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(called, ast.Attribute) and called.attr == "compile":
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            if owner != "re" and (called is not node or owner == "torch"):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (node.lineno for alias in node.names if alias.name == "compile")


def calls_of_modules_in(source: str) -> Iterator[int]:
    """Lines that call a held module itself: ``self.model(x)``, ``stages[0](x)``, ``parts.modules[name](x)``."""
    for node in nodes_of(source):
        if isinstance(node, ast.Call):
            function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
            indexed = isinstance(node.func, ast.Subscript)
            if (
                isinstance(function, ast.Attribute)
                and function.attr in HOLDERS
                and (indexed or _is_own(function, node))
            ):
                yield node.lineno
            if isinstance(function, ast.Name) and function.id in HOLDERS:
                yield node.lineno


def _is_own(function: ast.Attribute, call: ast.Call) -> bool:
    """``self.model(…)``, unless it builds one: nothing, or a dtype, is no input."""
    builds = not call.args or ast.unparse(call.args[0]) == "dtype"
    own = isinstance(function.value, ast.Name) and function.value.id == "self"
    return own and function.attr in {"model", "module"} and not builds


def places(found: dict[str, list[int]]) -> list[str]:
    return [f"{name}:{line}" for name, lines in found.items() for line in lines]


def test_nothing_but_the_boundary_marks_a_step() -> None:
    found = {name_of(path): list(marks_in(path.read_text())) for path in SOURCES}
    assert found[next(iter(MARKING))]
    assert not places({name: lines for name, lines in found.items() if name not in MARKING | WATCHING})


def test_torch_compile_has_one_home() -> None:
    found = {name_of(path): list(compilations_in(path.read_text())) for path in SOURCES}
    assert found["service/models/compiled.py"]
    assert not places({name: lines for name, lines in found.items() if name not in COMPILING})


def test_modules_that_may_be_compiled_are_called_across_the_boundary() -> None:
    rooms = [path for path in SOURCES if name_of(path).startswith(CALLING)]
    assert len(rooms) > 40
    found = {name_of(path): list(calls_of_modules_in(path.read_text())) for path in rooms}
    assert not places(found)


@pytest.mark.parametrize(
    ("scan", "source"),
    [
        (marks_in, "import torch\ntorch.compiler.cudagraph_mark_step_begin()"),
        (marks_in, "from torch.compiler import cudagraph_mark_step_begin as mark\nmark()"),
        (marks_in, "getattr(trees, 'mark_step_begin')()"),
        (compilations_in, "model.compile(backend='inductor')"),
        (compilations_in, "from torch import compile as fast"),
        (compilations_in, "@torch.compile\ndef step(): ..."),
        (calls_of_modules_in, "class Engine:\n    def run(self, x):\n        return self.model(x)"),
        (calls_of_modules_in, "self.stages[0](x)"),
        (calls_of_modules_in, "parts.modules[name](x)"),
    ],
)
def test_the_scan_finds_what_it_looks_for(scan: object, source: str) -> None:
    assert list(scan(source))  # type: ignore[operator]
