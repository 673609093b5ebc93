"""A network between a process and its broker that can be cut and healed: while it is cut nothing passes, in neither
direction, and no connection is closed, as when cables are pulled.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class NetworkLink:
    """Forwards from a port on loopback to a broker's unix socket."""

    def __init__(self, broker_url: str) -> None:
        self._upstream = urlsplit(broker_url).path
        self._whole = threading.Event()
        self._whole.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listening.getsockname()[1]}/0"

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        """What was sent meanwhile arrives now."""
        self._whole.set()

    def close(self) -> None:
        self.heal()
        for end in (self._listening, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._ends += (near, far)
            try:
                far.connect(self._upstream)
            except OSError:
                near.close()
                continue
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._whole.wait()
                target.sendall(data)
        self._whole.wait()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def network_link(broker_url: str) -> Iterator[NetworkLink]:
    link = NetworkLink(broker_url)
    try:
        yield link
    finally:
        link.close()
