"""``exp``."""

from __future__ import annotations

import torch

from service.bounds.operators.smooth import Smooth

EXPONENTIAL = Smooth(torch.exp, torch.exp)
