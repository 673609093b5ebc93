"""Declares by what lists of jobs are filtered."""

from __future__ import annotations

from typing import TypedDict


class JobFilters(TypedDict, total=False):
    """Filters a list of jobs; ``label`` is ``key`` or ``key=value``, ``q`` part of an id, a name or a label, and
    ``sweep`` the id of a sweep, or ``none`` to leave out the jobs of all sweeps.
    """

    kind: str | None
    label: str | None
    owner: str | None
    project: str | None
    sweep: str | None
    q: str | None
