"""What ends a rank from outside: its supervisor's request to stop, and SIGTERM, which is nobody's request."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable

import orjson

from workers.lines import LineSplitter

STOP = b'{"type":"stop"}\n'
"""The line that a supervisor sends to a rank that shall end its work early."""
_LONGEST = 4096


class Control:
    """Listens to the supervisor on the rank's event connection, and to SIGTERM, in a thread of its own.

    ``stop`` is set when the supervisor asks for it. ``terminated`` is called, in that thread, when SIGTERM arrives: a
    supervisor never sends it, so the rank must say so and end. A process that this one forks has neither.
    """

    def __init__(self, connection: socket.socket, terminated: Callable[[], None]) -> None:
        """To be called in the main thread, which alone may say how signals are handled."""
        self.stop = threading.Event()
        self._connection = connection.dup()
        self._lines = LineSplitter(_LONGEST)
        self._terminated = terminated
        self._signals, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.register_at_fork(after_in_child=_let_go)
        threading.Thread(target=self._listen, name="trivet-control", daemon=True).start()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ, self._hear)
            selector.register(self._signals, selectors.EVENT_READ, self._be_signalled)
            while True:
                for key, _ in selector.select():
                    if not key.data():
                        selector.unregister(key.fileobj)

    def _hear(self) -> bool:
        """Take what the supervisor sent; False once it has hung up: its keeper ends this rank then."""
        with contextlib.suppress(ConnectionError):
            if text := self._connection.recv(_LONGEST):
                if any(_asks_to_stop(line.text) for line in self._lines.feed(text)):
                    self.stop.set()
                return True
        return False

    def _be_signalled(self) -> bool:
        if signal.SIGTERM in os.read(self._signals, 512):
            self._terminated()
        return True


def _asks_to_stop(line: bytes) -> bool:
    with contextlib.suppress(orjson.JSONDecodeError):
        return bool(orjson.loads(line) == {"type": "stop"})
    return False


def _let_go() -> None:
    """Without this SIGTERM to a forked helper would be taken for one to the rank: they share the pipe."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
