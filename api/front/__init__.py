"""Stands around the framework: what answers before it, and what becomes of requests that it refuses."""

from api.front.expensive import ExpensiveAnswers
from api.front.head_requests import HeadRequests
from api.front.middleware import Hardening, PlainHeads, RequestIds, known_names
from api.front.plain_routes import PlainRoutes

__all__ = ["ExpensiveAnswers", "Hardening", "HeadRequests", "PlainHeads", "PlainRoutes", "RequestIds", "known_names"]
