"""Serves the dashboard: server-rendered shells whose ES modules read the public API; no build step, no other origin."""

from api.dashboard.pages import PAGES, Page, mount

__all__ = ["PAGES", "Page", "mount"]
