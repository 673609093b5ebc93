"""A mail server on loopback that keeps the messages which it is sent."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default


@dataclass
class MailReceiver:
    """``refusals`` answer the next messages."""

    port: int = 0
    refusals: list[bytes] = field(default_factory=list)
    taken: list[tuple[str, EmailMessage]] = field(default_factory=list)


@contextmanager
def mail_receiver() -> Iterator[MailReceiver]:
    """Listen until the end of the block."""
    receiver = MailReceiver()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            recipient = ""
            while line := self.rfile.readline().strip():
                verb = line[:4].upper()
                if verb == b"RCPT":
                    recipient = line.decode().partition("<")[2].partition(">")[0]
                if verb != b"DATA":
                    self.wfile.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")
                    continue
                self.wfile.write(b"354 go on\r\n")
                content = b""
                while (part := self.rfile.readline()) != b".\r\n":
                    content += part
                if receiver.refusals:
                    self.wfile.write(receiver.refusals.pop(0))
                else:
                    receiver.taken.append((recipient, message_from_bytes(content, policy=default)))
                    self.wfile.write(b"250 ok\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        receiver.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield receiver
        finally:
            server.shutdown()
