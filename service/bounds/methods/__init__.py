"""Provides bounding methods: one file and one line each.

:mod:`.base` has the interfaces of methods and of their analyses, :mod:`.passes` the form of a method that takes only
intervals and plain backward passes (:mod:`.ibp`, :mod:`.crown_ibp`, :mod:`.crown`), and :mod:`.alpha` the methods that
optimise. :mod:`.layers` bounds the inputs of non-linear operators for all of them. The rigorous counterparts are in
:mod:`service.bounds.rigorous`. For many boxes of one shape, :mod:`.repeated` repeats a method: on a CUDA device from a
record with planned rows (:mod:`.record`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from service.bounds.methods.alpha import alpha_crown, alpha_crown_fixed
from service.bounds.methods.base import Analysis, Bounder, IntermediateBounds, Method
from service.bounds.methods.passes import crown, crown_ibp, ibp
from service.bounds.methods.repeated import repeatedly
from service.bounds.options import BoundOptions
from service.bounds.progress import ProgressMeter
from service.bounds.rigorous.method import (
    rigorous_alpha_crown,
    rigorous_alpha_crown_fixed,
    rigorous_crown,
    rigorous_crown_ibp,
    rigorous_ibp,
)

IBP = Method("ibp", ibp, rigorous_ibp, IntermediateBounds.INTERVALS)
CROWN_IBP = Method("crown-ibp", crown_ibp, rigorous_crown_ibp, IntermediateBounds.INTERVALS)
CROWN = Method("crown", crown, rigorous_crown, IntermediateBounds.LINEAR)
ALPHA_CROWN = Method("alpha-crown", alpha_crown, rigorous_alpha_crown, IntermediateBounds.OPTIMISED, optimises=True)
ALPHA_CROWN_FIXED = Method(
    "alpha-crown", alpha_crown_fixed, rigorous_alpha_crown_fixed, IntermediateBounds.LINEAR, optimises=True
)
BETA_CROWN = replace(CROWN, name="beta-crown")
"""The bounds of CROWN before a search that splits activations and optimises its subproblems' multipliers."""

METHODS: Mapping[str, Method] = {
    method.label: method for method in (IBP, CROWN_IBP, CROWN, ALPHA_CROWN, ALPHA_CROWN_FIXED)
}
"""The methods that bound by themselves, by their labels."""

__all__ = [
    "ALPHA_CROWN",
    "ALPHA_CROWN_FIXED",
    "BETA_CROWN",
    "CROWN",
    "CROWN_IBP",
    "IBP",
    "METHODS",
    "Analysis",
    "BoundOptions",
    "Bounder",
    "IntermediateBounds",
    "Method",
    "ProgressMeter",
    "repeatedly",
]
