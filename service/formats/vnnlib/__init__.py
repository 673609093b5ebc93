"""Reads VNN-LIB 1: the conditions on a counterexample, as boxes of inputs and halfspaces of outputs. Without torch."""

from __future__ import annotations

from service.formats.vnnlib.bundle import Bundle, NotThereError, Pair, bundle, sources
from service.formats.vnnlib.contradictions import contradict
from service.formats.vnnlib.formulas import parse
from service.formats.vnnlib.query import Disjunct, Halfspace, L2Ball, Number, Query, VnnlibError
from service.formats.vnnlib.terms import rounded_down, rounded_up

__all__ = [
    "Bundle",
    "Disjunct",
    "Halfspace",
    "L2Ball",
    "NotThereError",
    "Number",
    "Pair",
    "Query",
    "VnnlibError",
    "bundle",
    "contradict",
    "parse",
    "rounded_down",
    "rounded_up",
    "sources",
]
