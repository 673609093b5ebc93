"""The natural logarithm."""

from __future__ import annotations

import torch

from service.bounds.operators.smooth import Smooth

LOGARITHM = Smooth(torch.log, torch.reciprocal, defined=lambda bounds: bounds.lower > 0, inside=1.0)
