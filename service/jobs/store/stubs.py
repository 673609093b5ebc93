"""Declares typed stubs of the scripts in ``lua/``; each is checked against its file's header at import."""

# mypy: disable-error-code="empty-body"
# A stub declares a signature; its body is the Lua file.

from __future__ import annotations

from service.jobs.store.scripts import script

Flat = list[str]
"""A hash as Redis gives it from a script: field, value, field, value, …"""


@script("submit")
def submit(
    *, limits: str, idem: str, body_hash: str, suffix: str, record: str, indexes: str, after: str
) -> tuple[str, ...]: ...


@script("get")
def get(job_id: str) -> Flat: ...


@script("list")
def list_jobs(
    *, indexes: str, text: str, cursor: str, limit: int, scan: int, without: str, page_bytes: int
) -> tuple[str, *tuple[Flat, ...]]: ...


@script("cancel")
def cancel(limits: str, job_id: str) -> Flat: ...


@script("retry")
def retry(limits: str, job_id: str) -> Flat: ...


@script("delete")
def delete(job_id: str) -> int: ...


@script("place")
def place(limits: str) -> list[str]: ...


@script("oldest_wait")
def oldest_wait() -> int: ...


@script("due")
def due(limits: str, most: int) -> list[str]: ...


@script("claim")
def claim(limits: str, job_id: str, attempt: int, host: str, supervisor: str) -> tuple[str, str, str]: ...


@script("renew")
def renew(limits: str, job_id: str, attempt: int, host: str) -> str: ...


@script("emit")
def emit(  # noqa: PLR0917 - the order of the script's arguments
    limits: str, job_id: str, attempt: int, host: str, batch: int, progress: str, *entries: str
) -> int: ...


@script("record_artifact")
def record_artifact(*, limits: str, job_id: str, attempt: int, host: str, name: str, entry: str, event: str) -> int: ...


@script("finish")
def finish(*, limits: str, job_id: str, attempt: int, host: str, status: str, result: str, error: str) -> Flat: ...


@script("reap")
def reap(limits: str, most: int) -> list[str]: ...


@script("beat")
def beat(
    *,
    limits: str,
    host: str,
    address: str,
    cuda: str,
    cuda_count: int,
    cpu_slots: int,
    versions: str,
    isolation: str,
    live: str,
) -> list[str]: ...


@script("leave")
def leave(host: str) -> int: ...


@script("drain")
def drain(host: str, draining: str) -> int: ...


@script("list_hosts")
def list_hosts(limits: str, name: str) -> list[tuple[str, Flat, list[str], list[str], list[str]]]: ...


@script("ensure_admin")
def ensure_admin(key_id: str, entry: str) -> int: ...


@script("look_up_key")
def look_up_key(key_id: str) -> tuple[str, str, str]: ...


@script("begin_session")
def begin_session(session: str, page: str, key_id: str, idle_ms: int, longest_ms: int) -> int: ...


@script("use_session")
def use_session(session: str, page: str, ticket: str, path: str, idle_ms: int) -> tuple[()] | tuple[str, str]: ...


@script("ended_credentials")
def ended_credentials(*credentials: str) -> list[str]: ...


@script("refused_sign_in")
def refused_sign_in(address: str, window_ms: int) -> int: ...
