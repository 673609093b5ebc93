"""Bounds that hold in real arithmetic although they are computed in float64."""

from service.bounds.rigorous.method import (
    RIGOROUS,
    RigorousAnalysis,
    rigorous_alpha_crown,
    rigorous_crown,
    rigorous_lower_bounds,
)

__all__ = ["RIGOROUS", "RigorousAnalysis", "rigorous_alpha_crown", "rigorous_crown", "rigorous_lower_bounds"]
