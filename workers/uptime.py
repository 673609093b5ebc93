"""The clock of leases: it goes on while the host is suspended, and nobody sets it."""

from __future__ import annotations

import time


def uptime() -> float:
    """Return seconds since the host booted, those in suspension included; the same for all its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
