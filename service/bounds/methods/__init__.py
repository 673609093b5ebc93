"""Methods by the names that a specification uses: one file and one line each."""

from __future__ import annotations

from collections.abc import Mapping

from service.bounds.methods.alpha import alpha_crown, alpha_crown_fixed
from service.bounds.methods.base import Analysis, Effort, Method
from service.bounds.methods.crown import crown
from service.bounds.methods.crown_ibp import crown_ibp
from service.bounds.methods.ibp import ibp
from service.bounds.methods.progress import ProgressMeter
from service.bounds.methods.repeated import repeatedly

METHODS: Mapping[str, Method] = {
    "ibp": ibp,
    "crown-ibp": crown_ibp,
    "crown": crown,
    "alpha-crown": alpha_crown,
    "alpha-crown (fixed intermediate bounds)": alpha_crown_fixed,
}

__all__ = ["METHODS", "Analysis", "Effort", "Method", "ProgressMeter", "repeatedly"]
