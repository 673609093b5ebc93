"""Bounds of a network that is cut into pipeline stages.

Intervals go down the line with the values; coefficients go up against it, stage by stage to the input, and bounds
come back. A stage's relaxations and intervals stay with it, so a backward pass is one traversal in several
places: while a stage bounds its layers, previous stages serve its passes, and later ones wait.
"""

from __future__ import annotations

from service.bounds.stages.link import InStages, StageLink
from service.bounds.stages.staged import Staged, StagedAnalysis, divide_into_stages, prepare_stages

__all__ = ["InStages", "StageLink", "Staged", "StagedAnalysis", "divide_into_stages", "prepare_stages"]
