"""Decompose exported programs by a table that is made once.

``ExportedProgram.run_decompositions`` collects PyTorch's composite operators anew for each program and overrides every
one of them, also those that are to be decomposed as they are without it. For a small network that was two thirds of
the time of a capture. Here only those are overridden that are decomposed in another way or kept whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

from torch.export import ExportedProgram, default_decompositions, exported_program

from service.bounds.decompositions import DECOMPOSITIONS

Table = dict[Any, Callable[..., Any]]


def decomposed(program: ExportedProgram, whole: frozenset[str]) -> ExportedProgram:
    """Return ``program`` in core ATen, with :data:`DECOMPOSITIONS` instead of PyTorch's own and the operators that
    ``whole`` names (``"aten.softmax.int"``) as they are."""
    tables = _tables(whole)

    def split(table: Table) -> tuple[Table, Table]:
        return tables[0], table

    with patch.object(exported_program, "_split_decomp_table_to_cia_and_python_decomp", split):
        result: ExportedProgram = program.run_decompositions(dict(tables[1]))
        return result


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
    """Return PyTorch's decompositions of composite operators, and of all others."""
    composite, others = exported_program._split_decomp_table_to_cia_and_python_decomp(
        dict(default_decompositions().materialize())
    )
    return composite, others
