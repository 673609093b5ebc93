"""Bounds that are computed in float64 and hold in real arithmetic: every rounding is accounted for."""

from service.bounds.rigorous.method import RigorousAnalysis, rigorous_alpha_crown, rigorous_crown

__all__ = ["RigorousAnalysis", "rigorous_alpha_crown", "rigorous_crown"]
