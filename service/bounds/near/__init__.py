"""Tightens relaxations where inputs are a ball: values of later layers are near to each other, too.

The method is SDP-CROWN (Chiu, Chen, Zhang and Zhang, 2025): :mod:`.values` has the distance of each layer's values from
those of the ball's middle, and :mod:`.offsets` what that adds to linear bounds.
"""

from __future__ import annotations

from service.bounds.near.layers import NearLayers
from service.bounds.near.offsets import NearPieces, with_offsets

__all__ = ["NearLayers", "NearPieces", "with_offsets"]
