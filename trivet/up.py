"""``trivet up``: everything on this machine until Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from types import FrameType

from rich.text import Text

from service.jobs.settings import Settings
from service.linux import handle_signals
from trivet.local import LocalService
from trivet.terminal import Terminal

_POLL_S = 0.5


def run(settings: Settings, console: Terminal) -> int:
    """Run until a signal, and return 0. Raises :class:`trivet.local.StartError` when the service cannot start."""
    _tell_of_unusable_packages()
    try:
        with interruptible(), _restart_requests() as asked, LocalService(settings) as service:
            _announce(service, console)
            return _watch(service, console, asked)
    except KeyboardInterrupt:
        return 0


def _tell_of_unusable_packages() -> None:
    """Log which installed packages declare what cannot be used. Without any, this process spares itself the kinds of
    jobs, which take memory.
    """
    if any(group.startswith("trivet.") for group in entry_points().groups):
        import service.jobs.kinds.registry  # noqa: F401, PLC0415


def _announce(service: LocalService, console: Terminal) -> None:
    if service.leftovers:
        names = ", ".join(service.leftovers)
        console.print(
            f"Ended what a killed 'trivet up' left running here: {names}. Its jobs keep running.", style="yellow"
        )
    for line in service.said:
        console.print(line, style="yellow")
    if service.was_open:
        console.print(f"Closed {service.settings.layout.root} to other users, who could read it.", style="yellow")
    console.print("Trivet is up:", Text(service.url, style="bold"))
    if service.first_start:
        console.print(f"Admin key, kept in {service.settings.admin_key_path} for you alone:")
        console.print(Text(str(service.key), style="bold"))
    folder = service.settings.layout.root
    console.print(f"Data in {folder}. Ctrl-C stops everything; running jobs resume at the next start.")


def _watch(service: LocalService, console: Terminal, asked: threading.Event) -> int:
    try:
        while True:
            if asked.is_set():
                asked.clear()
                for line in service.roll():
                    console.print(line, style="yellow")
                console.print("the restart is done")
            for line in service.revive():
                console.print(line, style="yellow")
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        console.print("stopping …")
        return 0


@contextmanager
def _restart_requests() -> Iterator[threading.Event]:
    """Yield an event that SIGUSR1 sets: an operator asks for every part to be restarted in turn."""
    asked = threading.Event()
    with handle_signals(lambda *_: asked.set(), signal.SIGUSR1):
        yield asked


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into ``KeyboardInterrupt``: later ones do not interrupt the
    orderly end.
    """
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    with handle_signals(handle, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield
