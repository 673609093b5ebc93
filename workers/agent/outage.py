"""Says once that the broker is away, and once that it is back, however many threads notice."""

from __future__ import annotations

import logging
import threading
import time

_REPEAT_S = 60.0

logger = logging.getLogger(__name__)


class Outage:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began: float | None = None
        self._said = 0.0

    def note(self, error: Exception) -> None:
        """Log the error, unless the outage that it belongs to was logged in the last minute."""
        with self._lock:
            now = time.monotonic()
            if self._began is None:
                self._began, self._said = now, now
                logger.warning("the broker is away, and waited for: %s", error)
            elif now - self._said >= _REPEAT_S:
                self._said = now
                logger.warning("the broker has been away for %.0f s: %s", now - self._began, error)

    def over(self) -> None:
        """Log that the broker answers again, where it had not."""
        with self._lock:
            if self._began is not None:
                logger.info("the broker is back after %.1f s", time.monotonic() - self._began)
                self._began = None
