"""Reads JSON bodies and refuses repeated keys: of two values for one key, a proxy and the service might take
different ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class _StrictRequest(Request):
    async def json(self) -> Any:
        """Return the body's JSON. Raises :class:`json.JSONDecodeError`, even for an object with a key twice."""
        if not hasattr(self, "_json"):
            self._json = loads(await self.body())
        return self._json


class StrictRoute(APIRoute):
    """The route of calls that take a JSON body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


def loads(body: bytes) -> Any:
    """Return the value of a JSON text. Raises :class:`json.JSONDecodeError`, even for an object with a key twice."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")

    def whole(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            at = text.rfind(json.dumps(twice, ensure_ascii=False))
            raise json.JSONDecodeError(f"the key {twice[:100]!r} is there twice", text, max(0, at))
        return found

    return json.loads(text, object_pairs_hook=whole)
