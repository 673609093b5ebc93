"""Reads times from the command line: an age or a duration such as 7d, or a time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from trivet.cli.context import refuse

_DURATION = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def past(text: str | None) -> datetime | None:
    """Return the time that an option names: so long ago, or a time."""
    length = duration(text)
    try:
        return _time(text) if length is None else datetime.now(UTC) - length
    except OverflowError:
        refuse(f"{text!r} is longer ago than time reaches back")


def future(text: str | None) -> datetime | None:
    """Return the time that an option names: so long from now, or a time."""
    length = duration(text)
    try:
        return _time(text) if length is None else datetime.now(UTC) + length
    except OverflowError:
        refuse(f"{text!r} is further away than time reaches")


def duration(text: str | None) -> timedelta | None:
    """Return the length of time that a text such as 90d or 24h names; ``None`` for any other text."""
    found = _DURATION.fullmatch(text or "")
    try:
        return None if found is None else timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        refuse(f"{text!r} is longer than time can be counted")


def _time(text: str | None) -> datetime | None:
    """Return a time, in UTC where it names no zone."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        refuse(f"{text!r} is neither a length of time such as 2h or 7d nor a time such as 2026-01-31T12:00")
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
