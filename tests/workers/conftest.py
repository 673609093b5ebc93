"""Fixtures of the workers' tests."""

from __future__ import annotations

from worker_fleet import fleet, limits

__all__ = ["fleet", "limits"]
