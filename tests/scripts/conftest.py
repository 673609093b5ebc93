"""Fixtures of the tests of scripts."""

from worker_fleet import fleet, limits

__all__ = ["fleet", "limits"]
