"""A heap that is quickly searched for holders of results."""

from __future__ import annotations

from set_aside import _quick_to_search, _set_aside  # noqa: F401 - fixtures
