"""Shows where a rank hangs: it writes its Python stacks on request, at any moment."""

from __future__ import annotations

import faulthandler
import re
import signal
from pathlib import Path

REQUEST = signal.SIGUSR1
"""The signal on which a rank writes its stacks. The interpreter answers in C, so also from within a call that hangs."""
_CAUGHT = re.compile(rb"^SigCgt:\s*(?P<signals>[0-9a-f]+)$", re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^ +File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


def stacks_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's stacks in the folder of its attempt."""
    return folder / f"stacks.rank-{rank}.txt"


def write_on_request(folder: Path, rank: int) -> None:
    """Make :data:`REQUEST` write this rank's stacks from now on; call it once."""
    file = stacks_file(folder, rank).open("w")
    faulthandler.register(REQUEST, file=file, all_threads=True)


def answers(pid: int) -> bool:
    """Return whether a process handles :data:`REQUEST` as a rank does. A fork of a rank writes its stacks
    behind the rank's; any other process would end by the signal.
    """
    try:
        caught = _CAUGHT.search(Path(f"/proc/{pid}/status").read_bytes())  # a name may end within a letter
    except OSError:
        return False
    return caught is not None and bool(int(caught["signals"], 16) >> (REQUEST - 1) & 1)


def innermost_frame(stacks: str) -> str:
    """Return the line at which the main thread is, for people; ``stacks`` may be empty."""
    threads = _THREAD.split(stacks)
    frame = _FRAME.search(threads[-1]) if len(threads) > 1 else None  # the main thread is the oldest, and comes last
    if frame is None:
        return "an unknown place: it did not answer, like a process that is stopped or waits for a disk"
    return f"{frame['function']} ({Path(frame['file']).name}:{frame['line']})"
