"""Obeys what ends a rank from outside: its supervisor's request, the end of its lease, and SIGTERM, which nobody asks
for.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable

import orjson

from workers.event_protocol import LineSplitter
from workers.linux import uptime

_LONGEST = 4096


class Control:
    """Listens to the supervisor on the rank's control connection, and to SIGTERM, in a thread of its own.

    ``stop`` is set when the supervisor asks for it. When the lease ends that the supervisor told of last, the thread
    kills the rank: by then another attempt may write to the job's folder. ``terminated`` is called, in that thread,
    when SIGTERM arrives: a supervisor never sends it, so the rank must say so and end. A process that this one forks
    has none of it.
    """

    def __init__(self, connection: socket.socket, terminated: Callable[[], None]) -> None:
        """Begin to listen. The main thread calls this, which alone may say how signals are handled."""
        self.stop = threading.Event()
        self._connection = connection.dup()
        self._lines = LineSplitter(_LONGEST)
        self._until = math.inf
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
                wait = None if math.isinf(self._until) else max(0.0, self._until - uptime())
                # The lease may have been extended while this process could not run, and Python does not look again
                # when a wait that was interrupted is over: what has come is read first.
                ready = selector.select(wait) or selector.select(0)
                for key, _ in ready:
                    if not key.data():
                        selector.unregister(key.fileobj)
                if not ready and uptime() >= self._until:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self) -> bool:
        """Take what the supervisor sent; False once it has hung up: its keeper ends this rank then, or the lease."""
        with contextlib.suppress(ConnectionError):
            if text := self._connection.recv(_LONGEST):
                for line in self._lines.feed(text):
                    self._obey(line.text)
                return True
        return False

    def _obey(self, line: bytes) -> None:
        match orjson.loads(line):
            case {"type": "stop"}:
                self.stop.set()
            case {"type": "lease", "until": float(until)}:
                self._until = until

    def _be_signalled(self) -> bool:
        if signal.SIGTERM in os.read(self._signals, 512):
            self._terminated()
        return True


def _let_go() -> None:
    """Handle no signals in a forked helper, whose SIGTERM would be taken for one to the rank: they share the pipe."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
