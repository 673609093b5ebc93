"""Fixtures of the workers' tests."""

from worker_fleet import fleet, limits, mortal, outage

__all__ = ["fleet", "limits", "mortal", "outage"]
