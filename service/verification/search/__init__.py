"""Deciding a query: an attack first, then bounds on ever smaller boxes of inputs."""

from __future__ import annotations

from service.verification.search.decide import Decision, decide
from service.verification.search.subject import Subject

__all__ = ["Decision", "Subject", "decide"]
