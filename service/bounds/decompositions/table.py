"""Decomposes exported programs by a table that is made once.

``ExportedProgram.run_decompositions`` collects PyTorch's composite operators for each program and overrides every one
of them, even those with their default decomposition. For a small network that took two thirds of a capture. This
overrides only operators that are decomposed differently or kept whole. A program with nothing to decompose,
such as layers with ReLU between, is not traced a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any
from unittest.mock import patch

from torch.export import ExportedProgram, default_decompositions

from service.bounds.decompositions import DECOMPOSITIONS
from service.torch_internals.table import internal, internal_of
from service.torch_internals.types import SCHEMA, OpOverload

Table = dict[Any, Callable[..., Any]]
_SPLIT = "torch.export.exported_program._split_decomp_table_to_cia_and_python_decomp"


def decomposed(program: ExportedProgram, whole: frozenset[str], bounded: Collection[str]) -> ExportedProgram:
    """Return ``program`` in core ATen, with :data:`DECOMPOSITIONS` instead of PyTorch's own and the operators that
    ``whole`` names (``"aten.softmax.int"``) as they are. ``bounded`` names all operators that are bounded."""
    if _is_final(program, bounded):
        return program
    tables = _tables(whole)

    def split(table: Table) -> tuple[Table, Table]:
        return tables[0], table

    with patch(_SPLIT, split):
        result: ExportedProgram = program.run_decompositions(dict(tables[1]))
        return result


def _is_final(program: ExportedProgram, bounded: Collection[str]) -> bool:
    """Return whether the input goes only through ``bounded`` operators that change nothing in place and have no
    decomposition. Operators of constants run as they are.
    """
    owners = program.graph_signature.inputs_to_lifted_tensor_constants
    given = [node for node in program.graph.nodes if node.op == "placeholder" and node.name not in owners]
    dependent = {given[0]}
    for node in program.graph.nodes:
        if node.op == "call_function" and not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        elif node.op not in {"placeholder", "call_function", "output"}:
            return False
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return all(_is_plain(node.target) and (node not in dependent or _stays(node.target, bounded)) for node in calls)


def _is_plain(target: Any) -> bool:
    return isinstance(target, OpOverload) and not internal_of(target, SCHEMA).is_mutable


def _stays(target: OpOverload, bounded: Collection[str]) -> bool:
    return str(target) in bounded and target not in DECOMPOSITIONS and target not in _defaults()[1]


def _tables(whole: frozenset[str]) -> tuple[Table, Table]:
    """Return the overrides of composite operators, and the decompositions of all others."""
    composite, others = _defaults()
    kept = {overload: _keep for overload in composite if str(overload) in whole}
    written = {overload: written for overload, written in DECOMPOSITIONS.items() if overload in composite}
    table = {overload: decompose for overload, decompose in others.items() if str(overload) not in whole}
    table |= {overload: written for overload, written in DECOMPOSITIONS.items() if overload not in composite}
    return kept | written, table


def _keep(*_: Any, **__: Any) -> Any:
    """Tell the dispatcher that an operator stays whole."""
    return NotImplemented


@cache
def _defaults() -> tuple[Table, Table]:
    """Return PyTorch's decompositions of composite operators, and those of all others."""
    composite, others = internal(_SPLIT)(dict(default_decompositions().materialize()))
    return composite, others
