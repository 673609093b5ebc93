"""Declares typed stubs of the scripts in ``lua/``; each is checked against its file's header at import."""

# mypy: disable-error-code="empty-body"
# A stub declares a signature; its body is the Lua file.

from __future__ import annotations

from service.jobs.store.scripts import script

Flat = list[str]
"""A hash as Redis gives it from a script: field, value, field, value, …"""
Outcome = tuple[str, str, str, *tuple[Flat, ...]]
"""The outcome of a submission, see ``lua/submit.lua``; the record of a single job follows."""


@script("submit")
def submit(*, limits: str, entries: str) -> list[Outcome]: ...


@script("submit_sweep")
def submit_sweep(*, limits: str, parent: str, children: str, metric: str, mode: str) -> tuple[str, str, str]: ...


@script("get")
def get(job_id: str) -> Flat: ...


@script("list")
def list_jobs(
    *, filters: str, text: str, cursor: str, limit: int, scan: int, without: str, page_bytes: int
) -> tuple[str, *tuple[Flat, ...]]: ...


@script("list_these")
def list_these(
    filters: str, text: str, limit: int, without: str, page_bytes: int, *ids: str
) -> tuple[int, *tuple[Flat, ...]]: ...


@script("count_jobs")
def count_jobs(filters: str, text: str, cursor: str, scan: int) -> tuple[str, *tuple[str | int, ...]]: ...


@script("cancel")
def cancel(limits: str, job_id: str) -> Flat: ...


@script("retry")
def retry(limits: str, job_id: str) -> Flat: ...


@script("delete")
def delete(job_id: str) -> list[str]: ...


@script("adopt")
def adopt(cursor: str, most: int) -> str: ...


@script("place")
def place(limits: str) -> list[str]: ...


@script("hold_launcher")
def hold_launcher(launcher: str, worker: str, hold_ms: int) -> int: ...


@script("read_launching")
def read_launching(limits: str, launcher: str, most: int, *ids: str) -> tuple[list[list[str]], list[list[str]]]: ...


@script("tell_allocating")
def tell_allocating(launcher: str, reasons: str) -> int: ...


@script("place_allocated")
def place_allocated(limits: str, job_id: str, allocation: str, *hosts: str) -> tuple[str, str]: ...


@script("oldest_wait")
def oldest_wait() -> int: ...


@script("read_queue")
def read_queue(after: str, most: int) -> tuple[int, *tuple[list[str], ...]]: ...


@script("read_running")
def read_running(state: str, after: str, most: int) -> list[list[str]]: ...


@script("read_device_use")
def read_device_use(limits: str, project: str) -> tuple[str, str]: ...


@script("set_quotas")
def set_quotas(project: str, entry: str, placement_quotas: str) -> int: ...


@script("read_uses")
def read_uses(limits: str) -> list[list[str]]: ...


@script("read_preemptible")
def read_preemptible(most: int) -> tuple[()] | tuple[list[str], list[list[str]]]: ...


@script("preempt")
def preempt(limits: str, job_id: str, pool: str, victims: str) -> int: ...


@script("recent_durations")
def recent_durations(most: int) -> Flat: ...


@script("waiting")
def waiting(*ids: str) -> list[Flat]: ...


@script("oldest_dispatch")
def oldest_dispatch(limits: str) -> int: ...


@script("queue_depths")
def queue_depths() -> list[tuple[str, str, str]]: ...


@script("add_counts")
def add_counts(counted: str) -> int: ...


@script("due")
def due(limits: str, most: int) -> list[str]: ...


@script("claim")
def claim(limits: str, job_id: str, attempt: int, host: str, supervisor: str) -> tuple[str, str, str]: ...


@script("renew")
def renew(limits: str, job_id: str, attempt: int, host: str) -> str: ...


@script("emit")
def emit(  # noqa: PLR0917 - the order of the script's arguments
    limits: str,
    job_id: str,
    attempt: int,
    host: str,
    batch: int,
    progress: str,
    phases: str,
    reached: str,
    *entries: str,
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
    launchers: str,
    allocation: str,
    clock_ms: int,
    live: str,
) -> list[str]: ...


@script("leave")
def leave(limits: str, host: str) -> int: ...


@script("drain")
def drain(limits: str, host: str, draining: str) -> int: ...


@script("list_hosts")
def list_hosts(limits: str, name: str) -> list[tuple[str, Flat, list[str], list[str], list[str]]]: ...


@script("ensure_admin")
def ensure_admin(key_id: str, entry: str) -> int: ...


@script("rotate_key")
def rotate_key(*, key_id: str, known: str, entry: str, successor_id: str, successor: str) -> int: ...


@script("admit_person")
def admit_person(*, key_id: str, entry: str, project: str, owner: str, role: str) -> int: ...


@script("create_account")
def create_account(name: str, entry: str, project: str) -> int: ...


@script("switch_account")
def switch_account(name: str, entry: str, disabled: int) -> int: ...


@script("delete_account")
def delete_account(name: str) -> int: ...


@script("look_up_key")
def look_up_key(key_id: str) -> tuple[str, str, str, str]: ...


@script("enter_key")
def enter_key(*, key_id: str, entry: str, project: str, owner: str, role: str, holder: str) -> int: ...


@script("set_member")
def set_member(project: str, owner: str, role: str) -> int: ...


@script("delete_project")
def delete_project(project: str) -> int: ...


@script("add_upload")
def add_upload(project: str, file: str, entry: str) -> str: ...


@script("describe_uploads")
def describe_uploads(project: str, *files: str) -> list[tuple[str, int, list[str], str]]: ...


@script("stale_uploads")
def stale_uploads(before_ms: int, most: int) -> list[str]: ...


@script("forget_upload")
def forget_upload(project: str, file: str, before_ms: int) -> int: ...


@script("share")
def share(job_id: str, project: str, wanted: str) -> Flat: ...


@script("begin_session")
def begin_session(session: str, page: str, key_id: str, idle_ms: int, longest_ms: int) -> int: ...


@script("use_session")
def use_session(session: str, page: str, ticket: str, path: str, idle_ms: int) -> tuple[()] | tuple[str, str, str]: ...


@script("ended_credentials")
def ended_credentials(*credentials: str) -> list[str]: ...


@script("count_within")
def count_within(counter: str, window_ms: int) -> int: ...


@script("append_audit")
def append_audit(number: int, previous: str, newest: str, *lines: str) -> tuple[int, str, str]: ...


@script("settle_restored")
def settle_restored(limits: str, cursor: str, most: int) -> list[str]: ...


@script("add_webhook")
def add_webhook(webhook: str, entry: str, most: int) -> int: ...


@script("delete_webhook")
def delete_webhook(webhook: str) -> int: ...


@script("make_deliveries")
def make_deliveries(change: str, keep_ms: int, most: int, *pieces: str) -> int: ...


@script("due_deliveries")
def due_deliveries(most: int, hold_ms: int) -> list[str]: ...


@script("due_exports")
def due_exports(most: int, hold_ms: int) -> list[str]: ...


@script("note_export")
def note_export(*, limits: str, job_id: str, target: str, state: str, again_ms: int, event: str) -> int: ...


@script("note_delivery")
def note_delivery(*, webhook: str, delivery: str, text: str, again_ms: int, succeeded: int, disable_ms: int) -> int: ...
