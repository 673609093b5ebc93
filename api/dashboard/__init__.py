"""Serves the dashboard: server-rendered shells whose ES modules read the public API; no build step, no other origin."""

from api.dashboard.pages import mount

__all__ = ["mount"]
