"""Serves live events: one hub a process reads them, encodes each once, and serves all who watch."""

from api.streams.frames import Cursor, Form
from api.streams.hub import Hub
from api.streams.subscriptions import HubSettings

__all__ = ["Cursor", "Form", "Hub", "HubSettings"]
