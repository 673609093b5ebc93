"""Answers ``supports``, the question of VNN-LIB's solver interface about what can be verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from service.formats.vnnlib import REAL


def _opsets() -> tuple[str, ...]:
    from service.formats.onnx import OPSETS  # noqa: PLC0415 - brings onnx, which most answers do not need

    return str(OPSETS[0]), str(OPSETS[-1])


def _operators() -> tuple[str, ...]:
    from service.formats.onnx import OPERATORS  # noqa: PLC0415 - as above

    return tuple(sorted({*OPERATORS, "Constant", "ConstantOfShape"}))  # any operator may compute constants


CAPABILITIES: Mapping[str, Callable[[], tuple[str, ...]]] = {
    "onnx-opset-versions": _opsets,
    "onnx-element-types": lambda: (REAL,),
    "onnx-operators": _operators,
    "vnnlib-versions": lambda: ("2.0", "2.0"),
    "hidden-node-theories": lambda: ("NH", "H"),
    "multiple-input-output-theories": lambda: ("SIO", "MIO"),
    "multiple-network-theories": lambda: ("SNET", "MENET", "MINET", "MNET"),
    "multiple-node-comparison-theories": lambda: ("SNC", "MNC"),
    "arithmetic-complexity-theories": lambda: ("BND", "OUTC", "LIN"),
    "optimised-disjunctive-reasoning": lambda: ("false",),
    "serialise-assignments": lambda: ("true",),
    "unsat-proofs": lambda: ("false",),
}
"""The lines of each answer. Bounds are those of real arithmetic, not of a type's roundings, and a query's disjunctions
are multiplied out.
"""
