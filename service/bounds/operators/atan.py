"""``atan``."""

from __future__ import annotations

import torch

from service.bounds.operators.smooth import Smooth

ARC_TANGENT = Smooth(
    torch.atan,
    lambda z: 1 / (1 + z.square()),
    turning=(0.0,),
    knots=(-20.0, -5.0, -2.0, -0.7, 0.7, 2.0, 5.0, 20.0),
)
