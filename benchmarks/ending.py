"""Ends a benchmark so that nothing that it started is left: services and their jobs have sessions of their own, which
no signal to the benchmark's reaches.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def end_by_signals() -> None:
    """Let the first SIGTERM, as of ``timeout``, or SIGHUP end this process by ``SystemExit``, which ends what is
    entered; later ones do not interrupt that. Other threads than the main one leave signals as they are.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, _exit)


def _exit(number: int, _: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
