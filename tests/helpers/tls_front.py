"""TLS in front of a broker, as a broker that is built with it would speak it, and what clients say behind it."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trustme

PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


class Front:
    """Ends TLS on a loopback port and passes on what it carries to a unix socket; without ``context`` it only
    listens."""

    def __init__(self, context: ssl.SSLContext | None, behind: Path) -> None:
        self._context, self._behind = context, behind
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._listening.getsockname()[1]
        self.heard = bytearray()
        """All that clients sent: inside TLS, and, where there is none, raw."""

    @contextmanager
    def running(self) -> Iterator[Front]:
        accepting = threading.Thread(target=self._accept, daemon=True)
        accepting.start()
        try:
            yield self
        finally:
            self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            accepting.join()
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.append(client)
        with contextlib.suppress(OSError):
            if self._context is None:
                self.heard += client.recv(1 << 16)
                client.sendall(b"-ERR unknown command\r\n")
                return
            spoken = self._context.wrap_socket(client, server_side=True)
            self._open.append(spoken)
            broker = socket.socket(socket.AF_UNIX)
            self._open.append(broker)
            broker.connect(str(self._behind))
            threading.Thread(target=self._pump, args=(broker, spoken, None), daemon=True).start()
            self._pump(spoken, broker, self.heard)

    def _pump(self, source: socket.socket, sink: socket.socket, noted: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                if noted is not None:
                    noted += chunk
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def server_context(certificate: trustme.LeafCert, clients: trustme.CA | None = None) -> ssl.SSLContext:
    """A server with this certificate, which asks clients for one that ``clients`` has signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    if clients is not None:
        clients.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
