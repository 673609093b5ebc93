"""Fixtures of the workers' tests."""

from worker_fleet import fleet, limits

__all__ = ["fleet", "limits"]
