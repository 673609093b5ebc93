"""Provides balls of inputs: one file and one line for each norm."""

from __future__ import annotations

from collections.abc import Mapping

from service.bounds.balls.base import Ball
from service.bounds.balls.euclidean import EuclideanBall
from service.bounds.balls.sparse import SparseBall
from service.bounds.balls.taxicab import TaxicabBall

BALLS: Mapping[int, type[Ball]] = {0: SparseBall, 1: TaxicabBall, 2: EuclideanBall}
"""Balls by the order of their norm."""

__all__ = ["BALLS", "Ball", "EuclideanBall", "SparseBall", "TaxicabBall"]
