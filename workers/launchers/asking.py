"""Provides what launchers share: an operator's options, a scheduler's commands, and its words when it fails."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from typing import NoReturn

from service.jobs.host import ENV_PREFIX
from workers.launchers import LauncherUnavailable

ANSWER_S = 30.0
"""Seconds that a scheduler has for each answer."""
NAME = "trivet-"
"""The prefix of the names of all requests."""
REPORT_S = 15.0
"""Seconds that hosts have to report beyond the grace of their ranks, before the scheduler ends them."""
_GONE = 404


class OperatorOptions(argparse.ArgumentParser):
    """Declares the operator's options for one launcher, written like those of a command in ``TRIVET_NAME_OPTIONS``."""

    def __init__(self, launcher: str) -> None:
        self.setting = f"{ENV_PREFIX}{launcher.upper()}_OPTIONS"
        super().__init__(prog=self.setting, add_help=False, allow_abbrev=False)

    def read(self, text: str) -> argparse.Namespace:
        """Return the options. Raises ``ValueError``, with the name of the setting, for unusable ones."""
        options, unknown = self.parse_known_args(self.words(text))
        if unknown:
            self.error(f"there is no option {unknown[0]}")
        return options

    def words(self, text: str) -> list[str]:
        """Return the words of the text as a shell reads them, for a scheduler whose own options they are."""
        try:
            return shlex.split(text)
        except ValueError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """Raise ``ValueError`` with the name of the setting, where a command would end."""
        raise ValueError(f"{self.setting}: {message}")


def own_environment() -> dict[str, str]:
    """Return this process's environment without the service's own settings, which may hold passwords:
    schedulers keep the environment of the processes that they start.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def ask(*command: str, stdin: str = "") -> str:
    """Return the output of a command of the scheduler. Raises :class:`LauncherUnavailable` if it fails."""
    with errors_of(command[0], OSError, subprocess.TimeoutExpired):
        ran = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=ANSWER_S, check=False, env=own_environment()
        )
    if ran.returncode != 0:
        raise LauncherUnavailable(f"{command[0]}: {ran.stderr.strip() or f'exit code {ran.returncode}'}")
    return ran.stdout


@contextlib.contextmanager
def errors_of(scheduler: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn such errors into :class:`LauncherUnavailable`, with the scheduler and its words."""
    try:
        yield
    except kinds as error:
        raise LauncherUnavailable(f"{scheduler}: {error or type(error).__name__}") from error


def refused(scheduler: str, status: int, reason: str, body: str, gone_is_fine: bool = False) -> None:
    """Raise :class:`LauncherUnavailable` for an HTTP answer other than success, with its message in JSON, or
    else its last line. With ``gone_is_fine``, 404 counts as success.
    """
    if not (gone_is_fine and status == _GONE):
        raise LauncherUnavailable(f"{scheduler}: {status}, {_message(body) or reason}")


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return (body.strip().splitlines() or [""])[-1]
