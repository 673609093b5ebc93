"""Defines verdicts, and the margin by which a bound in plain arithmetic must exceed its threshold to decide one.

Plain bounds are computed in the model's own floating-point type with rounding to nearest, so a computed lower bound can
lie above the exact one. Against float64 the error stays below 2e-5 of the bounds' size in float32 on networks of
practical depth. The margins are an estimate, not a proof about rounding.
"""

from __future__ import annotations

from enum import Enum

import torch

RELATIVE_MARGIN = {torch.float32: 2e-5, torch.float64: 1e-10}
"""A share of the largest bound that was added up."""
ABSOLUTE_MARGIN = {torch.float32: 1e-5, torch.float64: 1e-12}


class Verdict(Enum):
    VERIFIED = "verified"
    FALSIFIED = "falsified"
    UNKNOWN = "unknown"
