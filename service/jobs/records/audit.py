"""Defines the entries of the audit log, and chains them so that any change is noticed.

The hash of an entry is the SHA-256 of its other fields, among them the hash of the entry before it. Whoever
changes, removes or inserts an entry must also change every later one, up to the newest. An operator may have
noted that entry's number and hash (the *head*) elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, PlainSerializer

from service.jobs.records import FrozenModel, shortened

AuditAction = Literal[
    "job.submit", "job.cancel", "job.retry", "job.delete", "job.share", "job.unshare", "file.upload", "file.delete",
    "project.create", "project.change", "project.delete", "member.set", "member.remove", "host.drain", "host.resume",
    "project.weigh", "key.create", "key.revoke", "key.rotate", "account.create", "account.disable", "account.enable",
    "account.delete", "webhook.create", "webhook.delete", "webhook.renew", "session.begin", "session.end",
    "key.refuse", "person.admit", "sign_in.refuse", "permission.refuse",
]  # fmt: skip
"""The recorded actions: a noun and a verb. The service itself does ``refuse``."""

_LONGEST_DETAIL = 200
_Moment = Annotated[
    datetime, PlainSerializer(lambda at: at.isoformat(timespec="milliseconds").replace("+00:00", "Z"), when_used="json")
]


class AuditRecord(FrozenModel):
    """One record: who did what."""

    action: AuditAction
    actor: str = Field(description="name of the key, or empty for somebody who showed no valid one")
    key: str = Field("", description="id of the key that spoke, or whose session did")
    session: str = Field("", description="which of the key's sessions, where one spoke")
    address: str = Field("", description="network address that the request came from; empty for the service's socket")
    job: str | None = Field(None, description="the job that this is about")
    subject: str | None = Field(None, description="id or name of what else this is about: a file, host, key")
    detail: dict[str, str] = Field(default_factory=dict)


class AuditEntry(AuditRecord):
    """A record in its place in the chain."""

    number: int
    time: _Moment
    previous: str = Field(description="hash of the entry before")
    hash: str = Field(description="SHA-256 of the other fields as JSON with sorted names and no spaces")

    @property
    def line(self) -> bytes:
        """Return the entry as it is stored and exported, without a line feed."""
        return orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)


class AuditHead(FrozenModel):
    """Identifies the newest entry."""

    number: int = 0
    hash: str = "0" * 64

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"


class AuditPage(FrozenModel):
    """Entries, newest first. A page may have fewer than requested although more follow."""

    items: tuple[AuditEntry, ...]
    next_cursor: str | None = None
    head: AuditHead
    """The newest entry of all, to be noted for a later ``trivet audit verify``."""


class BrokenChain(Exception):  # noqa: N818 - what was found, not what went wrong here
    """An entry was changed, removed or inserted."""


def chained(records: Sequence[AuditRecord], head: AuditHead, at: datetime | None = None) -> list[AuditEntry]:
    """Return the records as the entries that follow ``head``."""
    moment = at or datetime.now(UTC)
    moment = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    entries = []
    for record in records:
        short = {name: shortened(value, _LONGEST_DETAIL) for name, value in record.detail.items()}
        fields = {**dict(record), "detail": short, "number": head.number + 1, "time": moment}
        open_entry = AuditEntry(**fields, previous=head.hash, hash="")
        entry = open_entry.model_copy(update={"hash": digest(open_entry.model_dump(mode="json"))})
        entries.append(entry)
        head = AuditHead(number=entry.number, hash=entry.hash)
    return entries


def digest(fields: dict[str, Any]) -> str:
    """Return the hash of an entry's fields, without its own ``hash``."""
    others = {name: value for name, value in fields.items() if name != "hash"}
    return hashlib.sha256(orjson.dumps(others, option=orjson.OPT_SORT_KEYS)).hexdigest()


@dataclass(frozen=True)
class VerifiedChain:
    """The entries that are whole: numbers ``first`` to ``head.number``; none if ``first`` is 0."""

    first: int
    head: AuditHead

    @property
    def entries(self) -> int:
        return self.head.number - self.first + 1 if self.first else 0


def verify_chain(lines: Iterable[bytes | str], noted: Sequence[AuditHead] = ()) -> VerifiedChain:
    """Check consecutive entries, oldest first. The first may have any number, since the oldest are deleted in time.

    Each of ``noted`` must be among them unless it is older than the first. Raises :class:`BrokenChain` with the
    number of the first wrong entry.
    """
    first, head = 0, AuditHead()
    wanted = {each.number: each.hash for each in noted if each.number}
    for line in lines:
        fields = _fields(line, head.number + 1 if first else None)
        number = fields["number"]
        if first and number != head.number + 1:
            raise BrokenChain(f"entry {number} follows entry {head.number}: what was between them is missing")
        if fields.get("hash") != digest(fields):
            raise BrokenChain(f"entry {number} was changed: its hash is that of other fields")
        if (first or number == 1) and fields.get("previous") != head.hash:
            raise BrokenChain(f"entry {number} does not follow the entry before it: one of them was replaced")
        if wanted.get(number, fields["hash"]) != fields["hash"]:
            raise BrokenChain(f"entry {number} is not the one that was noted: the entries up to it were replaced")
        first, head = first or number, AuditHead(number=number, hash=fields["hash"])
    missing = [number for number in wanted if number > head.number]
    if missing:
        raise BrokenChain(f"entry {max(missing)} was noted and is missing: the last that is there is {head.number}")
    return VerifiedChain(first, head)


def _fields(line: bytes | str, expected: int | None) -> dict[str, Any]:
    place = "the first line" if expected is None else f"what should be entry {expected}"
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BrokenChain(f"{place} is not JSON: {error}") from None
    if not isinstance(fields, dict) or type(fields.get("number")) is not int:
        raise BrokenChain(f"{place} is not an entry of the audit log")
    return fields
