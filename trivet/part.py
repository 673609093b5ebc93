"""A part of this machine's service: a process that is started, watched, started again if need be, and ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

ENDS_WITHIN_S = 15.0
SETTLED_S = 10.0
"""What ends again sooner than this would go on to do so."""


@dataclass
class Part:
    """A child in a session of its own: Ctrl-C reaches its parent only, which ends the parts in order."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    descriptors: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] = field(init=False)
    again: float = -inf
    """When it was started again, by the monotonic clock."""

    def __post_init__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        self.start()

    def start_again(self) -> None:
        self.again = time.monotonic()
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *self.arguments],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=self.descriptors,
            )

    @property
    def ended(self) -> str | None:
        """How it ended by itself, if it did."""
        code = self.process.poll()
        return None if code is None else f"the {self.name} {how(code)}"

    @property
    def settled(self) -> bool:
        """Whether it has run well since its last start, so that another one is worth it."""
        return time.monotonic() - self.again > SETTLED_S

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def last_lines(self, count: int = 8) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


def how(code: int) -> str:
    """A process's exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = {each.value: each.name for each in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"
