"""``python -m service.jobs.submission.server FD``: forks a process with limits for each check.

It imports what checks need once (ONNX with the first check of files), so that a check starts within milliseconds. The
server itself reads no file and no request. Messages on its control socket (``FD``) tell it to begin a check, together
with the check's own connection, or to end one; it reports how each ended. When the other end is closed, it ends all
checks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass, field

from service.jobs.records import FrozenModel
from service.jobs.submission.confined import answer
from service.jobs.submission.request import CheckLimits
from service.linux import die_with_parent, forbid_new_privileges

LARGEST_MESSAGE = 4096


class CheckCommand(FrozenModel):
    """Begin the check ``number`` within ``limits``, or end it if there are none. A check of files may need ONNX."""

    number: int
    limits: CheckLimits | None
    opens_files: bool = False


class CheckEnding(FrozenModel):
    """Reports how a check's process ended: its exit code, negative for a signal's number, and its resource use."""

    number: int
    code: int
    processor_s: float
    memory_bytes: int


@dataclass
class _CheckForks:
    """Forks, ends and reaps the processes of checks; single-threaded, as a forking process must be."""

    control: socket.socket
    running: dict[int, int] = field(default_factory=dict)
    """Numbers of checks by process."""

    def serve(self) -> None:
        """Obey commands until the other end closes its control socket."""
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ, self._reap)
            selector.register(self.control, selectors.EVENT_READ, self._obey)
            try:
                while True:
                    for key, _ in selector.select():
                        if key.fileobj is woken:
                            woken.recv(LARGEST_MESSAGE)
                        key.data()
            except EOFError:
                pass
            finally:
                for process in self.running:
                    os.kill(process, signal.SIGKILL)

    def _obey(self) -> None:
        text, descriptors, _, _ = socket.recv_fds(self.control, LARGEST_MESSAGE, 1)
        if not text:
            raise EOFError
        command = CheckCommand.model_validate_json(text)
        if command.limits is not None:
            if command.opens_files:
                import onnx  # noqa: F401, PLC0415 - once, before the fork, and never where nobody has files
            with socket.socket(fileno=descriptors[0]) as connection:
                self._begin(command.number, command.limits, connection)
        else:
            for process, number in self.running.items():
                if number == command.number:
                    os.kill(process, signal.SIGKILL)

    def _begin(self, number: int, limits: CheckLimits, connection: socket.socket) -> None:
        server = os.getpid()
        process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.control.close()
            answer(connection, limits, server)
        self.running[process] = number

    def _reap(self) -> None:
        while self.running:
            process, status, usage = os.wait4(-1, os.WNOHANG)
            if process == 0:
                return
            ending = CheckEnding(
                number=self.running.pop(process),
                code=os.waitstatus_to_exitcode(status),
                processor_s=usage.ru_utime + usage.ru_stime,
                memory_bytes=usage.ru_maxrss * 1024,
            )
            self.control.send(ending.model_dump_json().encode())


def main(descriptor: int) -> None:
    """Serve the control socket ``descriptor``."""
    die_with_parent()  # the import takes seconds, in which the control socket is not read
    forbid_new_privileges()
    gc.collect()
    gc.freeze()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _CheckForks(socket.socket(fileno=descriptor)).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
