"""Each private name of torch is in one table, is there in the releases that the table says, and is missed by name."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from service.torch_internals.releases import TRIED, is_tried
from service.torch_internals.table import (
    INTERNALS,
    TorchInternalMissing,
    internal,
    internal_if_there,
    internal_of,
    set_internal,
)

ROOT = Path(__file__).parents[2]
TYPES = ROOT / "service" / "torch_internals" / "types.py"
SOURCES = sorted({path for room in ("service", "workers") for path in (ROOT / room).rglob("*.py")} - {TYPES})
RELEASE = ".".join(torch.__version__.split(".")[:2])
OF_PYTHON = {"_exit", "_getframe", "_current_frames", "_CONFIG_VARS", "_startTime", "_fields", "_json"}
"""Private names of Python itself, and of other packages."""
MARKED: dict[str, Callable[[Callable[[], None]], Any]] = {
    "torch.compile": lambda function: torch.compile(function, backend="eager"),
    "torch.compiler.disable": torch.compiler.disable,
}
"""What leaves a mark on the functions that it is given."""


def owner_of(name: str) -> tuple[Any, str]:
    """The module, class or object that has, or would have, the last part of a name."""
    path, _, attribute = name.rpartition(".")
    if path in MARKED:
        return MARKED[path](lambda: None), attribute
    owner: Any = torch
    path = "torch"
    for part in name.split(".")[1:-1]:
        path = f"{path}.{part}"
        try:
            owner = importlib.import_module(path)
        except ModuleNotFoundError:
            owner = getattr(owner, part)
    return owner, attribute


def is_there(name: str) -> bool:
    """Whether torch has it: as a module, an attribute, or what methods of a class set on its objects."""
    owner, attribute = owner_of(name)
    if hasattr(owner, attribute) or internal_if_there(name) is not None:
        return True
    methods = [method for kind in getattr(owner, "__mro__", ()) for method in vars(kind).values()]
    return any(attribute in method.__code__.co_names for method in methods if hasattr(method, "__code__"))


@pytest.mark.parametrize("name", INTERNALS)
def test_a_tried_release_has_what_the_table_says(name: str) -> None:
    if is_tried(torch.__version__):
        assert is_there(name) or RELEASE not in INTERNALS[name].releases


class Bare:
    """An object without any of the names."""


@pytest.mark.parametrize("name", INTERNALS)
def test_a_torch_that_lacks_a_name_is_told_of_by_that_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute = owner_of(name)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    if internal_if_there(name) is not None and attribute in vars(owner):
        monkeypatch.delattr(owner, attribute)
        monkeypatch.setitem(sys.modules, name, None)
        looks = [lambda: internal(name), lambda: internal_of(Bare(), name)]
    else:  # objects have it
        looks = [lambda: internal_of(Bare(), name)]
    for look in looks:
        with pytest.raises(TorchInternalMissing) as missed:
            look()
        said = str(missed.value)
        assert said.startswith(f"torch 2.99.0 has no {name}, which Trivet needs to {INTERNALS[name].purpose}; ")
        assert said.endswith(INTERNALS[name].releases[-1])


def test_a_name_is_set_where_torch_has_it_only(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.utils.checkpoint._CheckpointFrame"
    monkeypatch.setattr(torch.utils.checkpoint, "_CheckpointFrame", Bare)
    set_internal(name, Bare())
    assert isinstance(internal(name), Bare)
    monkeypatch.delattr(torch.utils.checkpoint, "_CheckpointFrame")
    set_internal(name, Bare())
    assert internal_if_there(name) is None


def test_releases_in_the_table_were_tried() -> None:
    assert all(row.releases and set(row.releases) <= set(TRIED) for row in INTERNALS.values())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines itself, attributes of its objects too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and names(node.value, {"self"}):
            yield node.attr


def names(node: ast.expr, texts: set[str]) -> bool:
    """Whether a name, or an attribute of one, is written as one of ``texts``."""
    if isinstance(node, ast.Name):
        return node.id in texts  # what most are, and known sooner
    return isinstance(node, ast.Attribute) and ast.unparse(node) in texts


def private_names_in(tree: ast.AST) -> Iterator[str]:
    """Private names that a file takes from modules or objects that it names, or asks for as text."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name.startswith("torch")]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            found = [] if names(node.value, {"aten", "torch.ops.aten"}) else [node.attr]
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            asks = names(node.func, {"getattr", "hasattr", "setattr", "patch.object"})
            found = [str(node.args[1].value)] if asks else []
        yield from (name for name in found if any(map(is_private, name.split("."))))


def read(path: Path) -> tuple[set[str], list[str]]:
    """Return what a file defines and what it takes. To keep trees would take longer than to make them."""
    tree = ast.parse(path.read_text())
    return set(defined_in(tree)), list(private_names_in(tree))


def unlisted(taken: Iterable[str], own: set[str]) -> list[str]:
    """Those that have no row, and modules that are imported although they may be missing."""
    known = {name.rpartition(".")[2] for name in INTERNALS} | own | OF_PYTHON
    return [name for name in taken if name not in known]


def test_every_private_name_of_torch_that_is_used_is_in_the_table() -> None:
    files = {str(path.relative_to(ROOT)): read(path) for path in SOURCES}
    own = set[str]().union(*(defined for defined, _ in files.values()))
    found = {path: unlisted(taken, own) for path, (_, taken) in files.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_row_of_the_table_is_used() -> None:
    texts = [path.read_text() for path in SOURCES if path.name != "table.py" or path.parent.name != "torch_internals"]
    assert [name for name in INTERNALS if not any(name.rpartition(".")[2] in text for text in texts)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo.config",
        "from torch._inductor import cudagraph_trees",
        "from torch.fx import _symbolic_trace",
        "tensor._typed_storage()",
        "getattr(tensor, '_version', 0)",
        "patch.object(module, '_version', 1)",
    ],
)
def test_the_scan_finds_what_has_no_row(source: str) -> None:
    assert unlisted(private_names_in(ast.parse(source)), set())
