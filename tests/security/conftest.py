"""Fixtures of the security tests."""

from __future__ import annotations

from key_listener import folder, listener
from webhook_service import receiver
from worker_fleet import fleet, limits

__all__ = ["fleet", "folder", "limits", "listener", "receiver"]
