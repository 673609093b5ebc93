"""Provides engines, which bound a model on one device, on tensor-parallel ranks or in pipeline stages, in either
arithmetic.

The loader of a task chooses one; nothing else in verification asks where a model is or whether bounds are rigorous.
The interface and the two arithmetics are in :mod:`.base`. :mod:`.stages` has the engine of a rank with all layers and
that of a pipeline stage.
"""

from service.verification.engine.base import PLAIN, RIGOROUS, Arithmetic, BoundingEngine
from service.verification.engine.stages import NetworkEngine, StagesEngine

__all__ = ["PLAIN", "RIGOROUS", "Arithmetic", "BoundingEngine", "NetworkEngine", "StagesEngine"]
