"""What launchers share: an operator's options, commands of a scheduler, and what it said where it failed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from typing import NoReturn

from service.jobs.settings_file import ENV_PREFIX
from workers.launchers import LauncherUnavailable

ANSWER_S = 30.0
"""Seconds that a scheduler has for each answer."""
NAME = "trivet-"
"""Begins the name of all that a scheduler is asked for."""
REPORT_S = 15.0
"""Seconds that hosts have to report beyond the grace of their ranks, before the scheduler ends them."""
_GONE = 404


class OperatorOptions(argparse.ArgumentParser):
    """Declares what the operator may set for one launcher, by ``TRIVET_NAME_OPTIONS``, as for a command."""

    def __init__(self, launcher: str) -> None:
        self.setting = f"{ENV_PREFIX}{launcher.upper()}_OPTIONS"
        super().__init__(prog=self.setting, add_help=False, allow_abbrev=False)

    def read(self, text: str) -> argparse.Namespace:
        """Return what was set. Raises ``ValueError``, with the name of the setting, for what cannot be used."""
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
    """Return this process's environment without the service's own settings, which may hold passwords: schedulers keep
    the environment of what they start.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def ask(*command: str, stdin: str = "") -> str:
    """Return what a command of the scheduler's prints. Raises :class:`LauncherUnavailable` where it fails."""
    with errors_of(command[0], OSError, subprocess.TimeoutExpired):
        ran = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
            env=own_environment(),
        )
    if ran.returncode != 0:
        raise LauncherUnavailable(f"{command[0]}: {ran.stderr.strip() or f'exit code {ran.returncode}'}")
    return ran.stdout


@contextlib.contextmanager
def errors_of(scheduler: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise :class:`LauncherUnavailable` in the place of such errors, with the scheduler and what it said."""
    try:
        yield
    except kinds as error:
        raise LauncherUnavailable(f"{scheduler}: {error or type(error).__name__}") from error


def refused(scheduler: str, status: int, reason: str, body: str, gone_is_fine: bool = False) -> None:
    """Raise :class:`LauncherUnavailable` for an answer over HTTP that is none of success, with what it says: the
    message of a JSON object, or else the last line. With ``gone_is_fine`` 404 is as good as success.
    """
    if not (gone_is_fine and status == _GONE):
        raise LauncherUnavailable(f"{scheduler}: {status}, {_message(body) or reason}")


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return (body.strip().splitlines() or [""])[-1]
