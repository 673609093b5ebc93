"""Defines the errors between a client and the service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.jobs.records import Job


class TrivetError(Exception):
    """Any failure that this package reports."""


class Unreachable(TrivetError):  # noqa: N818 - reads as the finding it is
    """Nothing answers at the service's address. ``sent`` says whether the request may have reached the service,
    and ``passes`` whether the next attempt may succeed.
    """

    def __init__(self, url: str, reason: str, *, sent: bool = True, passes: bool = True) -> None:
        super().__init__(f"no Trivet service answers at {url} ({reason})")
        self.url = url
        self.reason = reason
        self.sent = sent
        self.passes = passes

    def after(self, seconds: float) -> Unreachable:
        """Return the same error with the time spent on the call."""
        return Unreachable(self.url, f"{self.reason}; tried for {seconds:.0f} s", sent=self.sent, passes=self.passes)


class Refused(TrivetError):  # noqa: N818
    """The service answered with a problem (RFC 9457). ``errors`` names refused fields: path, message, got, expected."""

    def __init__(self, status: int, title: str, detail: str, errors: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(f"{title}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail
        self.errors = list(errors)

    def after(self, seconds: float) -> Refused:
        """Return the same refusal with the time spent on the call."""
        return Refused(self.status, self.title, f"{self.detail}; tried for {seconds:.0f} s", self.errors)


class ModuleRefused(TrivetError):  # noqa: N818
    """The module cannot be exported as it is; the message names the part of it, and its line."""


class JobFailed(TrivetError):  # noqa: N818
    """The job about a module did not succeed; ``job`` has why."""

    def __init__(self, job: Job) -> None:
        said = job.error.message if job.error else "it gave no reason"
        super().__init__(f"job {job.id} has ended as {job.state}: {said}")
        self.job = job
