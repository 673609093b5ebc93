"""Deciding a query: an attack first, then bounds on ever smaller domains."""

from __future__ import annotations

from service.verification.search.decide import Progress, decide
from service.verification.search.decision import Decision, Finding, Means, Moment, Search
from service.verification.search.subject import Subject

__all__ = ["Decision", "Finding", "Means", "Moment", "Progress", "Search", "Subject", "decide"]
