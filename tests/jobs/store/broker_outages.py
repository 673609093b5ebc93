"""A broker that is away for a while, and a store that waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.store import BrokerTimeouts

PATIENT = BrokerTimeouts(outage_s=300.0)


@contextmanager
def back_soon(folder: Path) -> Iterator[None]:
    """The broker of this folder is away at first, and starts while the block runs."""
    started: list[EmbeddedBroker] = []

    def start() -> None:
        time.sleep(0.3)
        started.append(EmbeddedBroker.start(folder))

    starter = threading.Thread(target=start)
    starter.start()
    try:
        yield
    finally:
        starter.join()
        started[0].stop()
