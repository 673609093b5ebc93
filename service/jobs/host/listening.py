"""Binds the port of the API, and tells the URL that leads to it."""

from __future__ import annotations

import socket


def bind_port(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises :class:`OSError`."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket, *, tls: bool) -> str:
    host, port = bound.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
