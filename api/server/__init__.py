"""Runs and measures one process of the API.

``serving``, which needs the server's package, is imported by its own name.
"""

from api.server.loops import repeat
from api.server.monitoring import V1, HttpMiddleware, Monitor, RequestTimes, Traces

__all__ = ["V1", "HttpMiddleware", "Monitor", "RequestTimes", "Traces", "repeat"]
