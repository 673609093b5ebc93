"""Reads a request's body before it is known who answers."""

from __future__ import annotations

from starlette.types import Message, Receive


class KeptBody:
    """A request's body, which can be received again."""

    def __init__(self, receive: Receive) -> None:
        self.rest = receive
        """Receives what follows the body."""
        self._told: list[Message] = []

    async def whole(self) -> bytes | None:
        """Return the body; ``None`` if the client left before its end."""
        parts = []
        while True:
            message = await self.rest()
            self._told.append(message)
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    async def again(self) -> Message:
        """Receive the kept messages, then those that follow."""
        return self._told.pop(0) if self._told else await self.rest()
