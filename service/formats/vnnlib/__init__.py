"""Reads VNN-LIB 1 and 2.0: conditions on a counterexample, boxes of inputs and halfspaces of outputs, without torch."""

from __future__ import annotations

from service.formats.vnnlib.balls import BALLS, ExactBall, L2Ball
from service.formats.vnnlib.bundle import Bundle, NotThereError, Pair, bundle, sources
from service.formats.vnnlib.contradictions import contradict
from service.formats.vnnlib.declared import REAL, DeclaredNetwork, DeclaredTensor, are_in_one_order, shown_shape
from service.formats.vnnlib.query import Disjunct, Halfspace, Number, Query, VnnlibError
from service.formats.vnnlib.reading import parse, parse_networks
from service.formats.vnnlib.terms import rounded_down, rounded_up
from service.formats.vnnlib.version2 import DeclaredQuery, is_version_2
from service.formats.vnnlib.writing import written

__all__ = [
    "BALLS",
    "REAL",
    "Bundle",
    "DeclaredNetwork",
    "DeclaredQuery",
    "DeclaredTensor",
    "Disjunct",
    "ExactBall",
    "Halfspace",
    "L2Ball",
    "NotThereError",
    "Number",
    "Pair",
    "Query",
    "VnnlibError",
    "are_in_one_order",
    "bundle",
    "contradict",
    "is_version_2",
    "parse",
    "parse_networks",
    "rounded_down",
    "rounded_up",
    "shown_shape",
    "sources",
    "written",
]
