"""Engines: what bounds a model, on one device, on tensor-parallel ranks or in pipeline stages, in either arithmetic.

The loader of a task chooses one; nothing else in verification asks where a model is or whether bounds are rigorous.
The interface is in :mod:`.base`, the two arithmetics in :mod:`.arithmetic`. :mod:`.stages` has the engine of a rank
with all layers and that of a pipeline stage.
"""

from service.verification.engine.arithmetic import PLAIN, RIGOROUS, Arithmetic
from service.verification.engine.base import BoundingEngine
from service.verification.engine.stages import NetworkEngine, StagesEngine

__all__ = ["PLAIN", "RIGOROUS", "Arithmetic", "BoundingEngine", "NetworkEngine", "StagesEngine"]
