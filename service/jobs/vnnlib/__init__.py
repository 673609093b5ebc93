"""VNN-LIB 1: what a counterexample must satisfy, as boxes of inputs and halfspaces of outputs. Without torch."""

from __future__ import annotations

from service.jobs.vnnlib.bundle import Bundle, NotThereError, Pair, bundle
from service.jobs.vnnlib.parsing import parse
from service.jobs.vnnlib.query import Case, Halfspace, Number, Query, VnnlibError, Within
from service.jobs.vnnlib.terms import rounded_down, rounded_up
from service.jobs.vnnlib.uploads import Source, sources

__all__ = [
    "Bundle",
    "Case",
    "Halfspace",
    "NotThereError",
    "Number",
    "Pair",
    "Query",
    "Source",
    "VnnlibError",
    "Within",
    "bundle",
    "parse",
    "rounded_down",
    "rounded_up",
    "sources",
]
