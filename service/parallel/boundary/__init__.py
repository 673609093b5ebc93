"""Watches the boundary between eager code and compiled modules.

CUDA graphs write every replay into the memory of the one before it. So a loop says where its steps begin, once a
step and nowhere else, and calls compiled modules only through :class:`StepBoundary`, which counts the calls, copies
what outlives a step, and refuses to begin one while a backward is still to come. A :class:`StepWatch` records what one
step did with them.
"""

from service.parallel.boundary.lifetimes import CallSite, HeldResult, Invocation, LiveResults, Origin, Shapes, caller
from service.parallel.boundary.step import PendingBackwardError, PendingBackwards, StepBoundary
from service.parallel.boundary.watch import Parts, StepWatch, parts_of

__all__ = [
    "CallSite",
    "HeldResult",
    "Invocation",
    "LiveResults",
    "Origin",
    "Parts",
    "PendingBackwardError",
    "PendingBackwards",
    "Shapes",
    "StepBoundary",
    "StepWatch",
    "caller",
    "parts_of",
]
