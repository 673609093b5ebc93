"""Finds and reads the TOML file with settings: ``TRIVET_CONFIG``, else ``trivet.toml`` in the working folder."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from service.jobs.host.private import user

ENV_PREFIX = "TRIVET_"


def config_file() -> Path | None:
    """Return the TOML file in use. A file that ``TRIVET_CONFIG`` names must exist; the default one need not."""
    named = os.environ.get(f"{ENV_PREFIX}CONFIG")
    if named is not None:
        path = Path(named)
        if not path.is_file():
            raise FileNotFoundError(f"TRIVET_CONFIG={named}: there is no such file")
        return path
    default = Path("trivet.toml")
    if not default.is_file():
        return None
    _check_trusted(default)
    return default


def _check_trusted(path: Path) -> None:
    """Refuse a file that somebody else put, or could have put, into the working folder."""
    strangers = {status.st_uid for status in (path.lstat(), path.stat())} - {os.geteuid(), 0}
    if strangers or path.stat().st_mode & 0o002:
        reason = f"belongs to {user(strangers.pop())}" if strangers else "may be written by every user"
        raise PermissionError(
            f"{path.resolve()} {reason}, so its settings are not used; if they are meant, set {ENV_PREFIX}CONFIG={path}"
        )


def in_file() -> dict[str, Any]:
    """Return the settings that the TOML file gives, whether or not the environment overrides them."""
    path = config_file()
    return {} if path is None else tomllib.loads(path.read_text())
