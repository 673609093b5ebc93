"""Defines a project's belongings besides its jobs (artifacts, uploads, keys, service accounts), and refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from service.jobs.accounts import DEFAULT_PROJECT, ROLES, SCOPES, Role, Scope, owner_in
from service.jobs.records.jobs import FrozenModel
from service.jobs.text import LONGEST_TEXT, shortened


@dataclass(frozen=True)
class Problem:
    """One reason to refuse an input: where, what, the given value and what would be accepted."""

    path: str
    message: str
    got: Any
    expected: str

    def shortened(self) -> Problem:
        """Return the problem with texts of at most :data:`LONGEST_TEXT` characters; a value that is longer as JSON
        becomes such a text.
        """
        try:
            got = json.dumps(self.got, default=str)
        except (ValueError, RecursionError):
            got = str(self.got)
        kept = self.got if len(got) <= LONGEST_TEXT else shortened(got)
        return Problem(shortened(self.path), shortened(self.message), kept, shortened(self.expected))


class Rejected(Exception):  # noqa: N818 - reads as the verdict it is
    """The input was refused; ``problems`` says why, field by field."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{problem.path}: {problem.message}" for problem in problems))
        self.problems = problems


class NotFound(Exception):  # noqa: N818
    """No such job, file, host, key or artifact."""


class Conflict(Exception):  # noqa: N818
    """The request conflicts with the present state (a reused idempotency key, the deletion of a running job)."""


class OverQuota(Exception):  # noqa: N818
    """A quota of the project is used up; the text names the quota, the amounts, and the project."""


class UnknownSpec(Exception):  # noqa: N818
    """An accepted spec is not understood here: the job was claimed and can only fail."""


class Superseded(Exception):  # noqa: N818
    """A write carried the number of an attempt that is no longer current."""


class Artifact(FrozenModel):
    name: str
    bytes: int
    sha256: str
    media_type: str
    created_at: datetime


class StoredFile(FrozenModel):
    """An upload, in the project that uploaded it first."""

    id: str
    sha256: str
    bytes: int
    media_type: str
    name: str = ""
    project: str = DEFAULT_PROJECT
    owner: str = ""
    created_at: datetime | None = None
    """``None`` for an upload to an older version."""


class Upload(StoredFile):
    """An upload with its use. ``jobs`` are the newest of the ``job_count`` jobs that name it."""

    last_used_at: datetime | None
    expires_at: datetime | None
    """``None`` if uploads never expire, and while an unfinished job needs it (``in_use``)."""
    in_use: bool
    job_count: int
    jobs: tuple[str, ...]


class ApiKey(FrozenModel):
    """A key without its secret. ``admin`` includes ``submit``, which includes ``read``.

    A key acts for its owner, whose name it has, in one project. Only an admin key may have no project: an operator's.
    """

    id: str
    name: str
    scopes: tuple[Scope, ...]
    project: str | None = DEFAULT_PROJECT
    created_at: datetime
    last_used_at: datetime | None = None
    expires_at: datetime | None = None
    """When it stops working, and its sessions and streams end."""
    holder: Literal["key", "person", "account"] = "key"
    """Who uses it: whoever was given the secret; a person who signs in through the OpenID Connect provider,
    without a secret; or a service account of the key's name.
    """
    successor: str | None = None
    """Id of the key that took its place when it was rotated."""

    @property
    def owner(self) -> str:
        """Return the name that tells its owner from all others."""
        return owner_in(self.project or DEFAULT_PROJECT, self.name)

    @property
    def is_operator(self) -> bool:
        """Return whether the key may do everything in every project, and run the service."""
        return self.project is None

    @property
    def role(self) -> Role:
        """Return the key's role in its project, by the greatest of its scopes."""
        return ROLES[max(map(SCOPES.index, self.scopes))]


class ServiceAccount(FrozenModel):
    """A program that owns jobs. Its keys may do what the account may, stop together, and begin no session."""

    name: str
    scopes: tuple[Scope, ...]
    project: str | None = DEFAULT_PROJECT
    created_at: datetime
    disabled: bool = False
    keys: tuple[ApiKey, ...] = ()
