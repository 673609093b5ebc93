"""Lists the exit codes of commands."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    """A job failed or was cancelled, a finding or an alert says that something is wrong, the audit log is broken."""
    REFUSED = 2
    """The command or its input was refused, or the service is out of reach. Typer ends with it too."""
    INTERRUPTED = 130
