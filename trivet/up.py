"""``trivet up``: everything on this machine until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from rich.console import Console

from service.jobs.settings import Settings
from trivet.local import LocalService

_POLL_S = 0.2


def run(settings: Settings, console: Console) -> int:
    """Run until a signal (0) or until a part dies (1)."""
    stopping = stop_signal()
    with LocalService(settings) as service:
        console.print(f"Trivet is up: [bold]{service.url}[/bold]")
        if service.first_start:
            console.print(f"Admin key (shown this once): [bold]{service.key}[/bold]")
        console.print(
            f"Data in {settings.layout.root}. Ctrl-C stops everything; running jobs resume at the next start."
        )
        while not stopping.wait(_POLL_S):
            if reason := service.dead_child():
                console.print(reason, style="red", markup=False)
                return 1
        console.print("stopping …")
    return 0


def stop_signal() -> threading.Event:
    """An event that SIGINT, SIGTERM and SIGHUP set; while starting they end the start as well."""
    stopping = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    return stopping
