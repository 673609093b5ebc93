"""The graph of a whole network, divided over tensor-parallel ranks.

:func:`shard` is for networks that were not built for a mesh: those of an ONNX file, or any traced module.
"""

from __future__ import annotations

from service.bounds.shard.parts import shard
from service.bounds.shard.regions import regions

__all__ = ["regions", "shard"]
