"""Declares typed stubs of the scripts in ``lua/``, and which parts call them; each is checked at import against its
file's header, which also states the script's work and cost.
"""

# mypy: disable-error-code="empty-body"
# A stub declares a signature; its body is the Lua file.

from __future__ import annotations

from service.jobs.spec.common import JobState
from service.jobs.store.scripts import script

Flat = list[str]
"""A hash as Redis gives it from a script: field, value, field, value, …"""
Entries = list[tuple[str, Flat]]
"""A piece of a stream: ids with fields and values."""
Outcome = tuple[str, str, str, *tuple[Flat, ...]]
"""The outcome of a submission, see ``lua/submit.lua``; the record of a single job follows."""


@script("submit", "api")
def submit(*, limits: str, entries: str) -> list[Outcome]:
    """Accept jobs, all or none; return the outcome of each."""


@script("submit_sweep", "api")
def submit_sweep(*, limits: str, parent: str, children: str, asked: str) -> tuple[str, str, str, int]:
    """Accept a sweep with its jobs, or nothing; return the outcome, and which of them was refused, 0 for the parent."""


@script("get", "api", "host")
def get(job_id: str) -> Flat:
    """Return a job's record, with the reason for its wait."""


@script("list", "api")
def list_jobs(
    *, filters: str, text: str, cursor: str, limit: int, scan: int, without: str, page_bytes: int
) -> tuple[str, *tuple[Flat, ...]]:
    """Return a page of jobs, newest first, after the id of the last one read, which is empty if no more follow."""


@script("list_these", "api")
def list_these(
    filters: str, text: str, limit: int, without: str, page_bytes: int, *ids: str
) -> tuple[int, *tuple[Flat, ...]]:
    """Return a page of the named jobs, in their order, after the number of names read."""


@script("count_jobs", "api")
def count_jobs(filters: str, text: str, cursor: str, scan: int) -> tuple[str, *tuple[str | int, ...]]:
    """Count a piece of the jobs by state, after the id of the last one read, which is empty if no more follow."""


@script("read_events", "api")
def read_events(most: int, most_bytes: int, *cursors: str) -> list[tuple[str, str, *tuple[Entries, ...]]]:
    """Return events of some jobs after a position in each, up to a number for each and bytes for all."""


@script("cancel", "api")
def cancel(limits: str, job_id: str) -> Flat:
    """Cancel a queued job at once, and ask an active one to stop; return its record."""


@script("retry", "api")
def retry(limits: str, job_id: str) -> Flat:
    """Queue a failed or cancelled job again; return its record."""


@script("delete", "api", "host")
def delete(job_id: str, only_asked: str) -> list[str]:
    """Forget a terminal job, or a sweep with all its jobs, or only ask; return the ids."""


@script("adopt", "api")
def adopt(cursor: str, most: int) -> str:
    """Give a piece of the jobs without a project to the default one; return the position of the next piece."""


@script("place", "host")
def place(limits: str) -> list[str]:
    """Give free devices to pending jobs; return the ids placed."""


@script("hold_launcher", "host")
def hold_launcher(launcher: str, worker: str, hold_ms: int) -> int:
    """Return 1 if this worker is the one that asks the launcher for devices, for ``hold_ms`` from now."""


@script("read_launching", "host")
def read_launching(limits: str, launcher: str, most: int, *ids: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the first pending jobs of a launcher, and the states of the jobs named."""


@script("tell_allocating", "host")
def tell_allocating(launcher: str, reasons: str) -> int:
    """Note why pending jobs have no devices of their launcher yet."""


@script("place_allocated", "host")
def place_allocated(limits: str, job_id: str, allocation: str, *hosts: str) -> tuple[str, str]:
    """Begin an attempt on the hosts of an allocation; return ``placed`` with its number, ``waits`` or ``over``."""


@script("oldest_wait", "api")
def oldest_wait() -> int:
    """Return for how many ms the oldest job that waits for devices has waited."""


@script("read_queue", "api")
def read_queue(after: str, most: int) -> tuple[int, *tuple[list[str], ...]]:
    """Return the store's time in ms, then a piece of the queue, in order of age."""


@script("read_running", "api")
def read_running(state: str, after: str, most: int) -> list[list[str]]:
    """Return a piece of the jobs in a state that holds devices, with the facts from which their ends are estimated."""


@script("read_device_use", "api")
def read_device_use(limits: str, project: str) -> tuple[str, str]:
    """Return the devices that a project holds, and the device-ms that it has used in the window."""


@script("create_project", "api")
def create_project(project: str, entry: str, placement_quotas: str) -> int:
    """Keep a new project; return 0 where there is one of this name."""


@script("change_project", "api")
def change_project(project: str, before: str, entry: str, placement_quotas: str) -> int:
    """Keep a changed project; return 0 where it is no longer what it was before."""


@script("read_uses", "api")
def read_uses(limits: str) -> list[list[str]]:
    """Return the use and the held devices of each project, with its weight."""


@script("read_preemptible", "host")
def read_preemptible(most: int) -> tuple[()] | tuple[list[str], list[list[str]]]:
    """Return pending jobs that wait only for devices, and running ones that may make room for them."""


@script("preempt", "host")
def preempt(limits: str, job_id: str, pool: str, victims: str) -> int:
    """Ask running jobs to make room for a pending one; return 1 if they were asked."""


@script("read_unjudged", "host")
def read_unjudged() -> tuple[()] | tuple[str, str, str, Flat, list[tuple[str, JobState, str]]]:
    """Return a sweep whose rule has values to judge."""


@script("end_early", "host")
def end_early(sweep: str, before: int, judged: int, stopped: str) -> int:
    """Keep a judgement, and tell the jobs that stop by it; return 1 unless there was another one meanwhile."""


@script("recent_durations", "api")
def recent_durations(most: int) -> Flat:
    """Return kind and ms of the newest jobs that succeeded."""


@script("waiting", "api", "host")
def waiting(*ids: str) -> list[Flat]:
    """Return the records of the queued ones of these jobs, with the reasons for their wait."""


@script("oldest_dispatch", "api")
def oldest_dispatch(limits: str) -> int:
    """Return for how many ms the oldest part that was placed has waited for a claim."""


@script("queue_depths", "api")
def queue_depths() -> list[tuple[str, str, str]]:
    """Return for each kind of device the number of waiting jobs, and for how many ms the oldest has waited."""


@script("add_counts", "api", "host")
def add_counts(counted: str) -> int:
    """Add the counts of one process to those of all."""


@script("due", "host")
def due(limits: str, most: int) -> list[str]:
    """Return the names of the parts to dispatch now."""


@script("claim", "host")
def claim(
    limits: str, job_id: str, attempt: int, host: str, supervisor: str
) -> tuple[str, str, str, list[str], list[str]]:
    """Make a supervisor the owner of a part; return spec, placement, the address of the leading host, and the uploads
    and jobs that its submission named.
    """


@script("renew", "host")
def renew(limits: str, job_id: str, attempt: int, host: str) -> str:
    """Extend the lease of a claimed part; return ``run``, ``stop``, ``lost``, or ``end`` and why."""


@script("emit", "host")
def emit(  # noqa: PLR0917 - the order of the script's arguments
    limits: str, job_id: str, attempt: int, host: str, batch: int, progress: str, phases: str, reached: str,
    *entries: str,
) -> int:  # fmt: skip
    """Append events of a claimed part; return 0 for a batch that is there already."""


@script("record_artifact", "host")
def record_artifact(*, limits: str, job_id: str, attempt: int, host: str, name: str, entry: str, event: str) -> int:
    """Enter an artifact of a claimed part; return 0 for an entry that is there already."""


@script("finish", "host")
def finish(*, limits: str, job_id: str, attempt: int, host: str, status: str, result: str, error: str) -> Flat:
    """End a claimed part, and the attempt with its last one; return the job's record."""


@script("reap", "host")
def reap(limits: str, most: int) -> list[str]:
    """Give up silent parts; return the ids of their jobs."""


@script("beat", "host")
def beat(
    *,
    limits: str,
    host: str,
    address: str,
    cuda: str,
    cuda_count: int,
    cpu_slots: int,
    versions: str,
    threads: str,
    isolation: str,
    launchers: str,
    allocation: str,
    overcommitted: str,
    clock_ms: int,
    live: str,
) -> list[str]:
    """Report a host; return whether it is draining (``1``), then the attempts that it must kill."""


@script("leave", "host")
def leave(limits: str, host: str) -> int:
    """Sign a host off: it gets no more work."""


@script("drain", "api")
def drain(limits: str, host: str, draining: str) -> int:
    """Stop (``1``) or resume (``0``) giving work to a host."""


@script("list_hosts", "api", "host")
def list_hosts(limits: str, name: str) -> list[tuple[str, Flat, list[str], list[str], list[str]]]:
    """Return every known host, or the named one: whether it is alive, its record, its free and its held devices."""


@script("ensure_admin", "api")
def ensure_admin(key_id: str, entry: str) -> int:
    """Enter a key unless an operator's exists; return 1 if it was entered."""


@script("rotate_key", "api")
def rotate_key(*, key_id: str, known: str, entry: str, successor_id: str, successor: str) -> int:
    """Enter the successor of a key, and the key as it is from now on."""


@script("admit_person", "api")
def admit_person(*, key_id: str, entry: str, project: str, owner: str, role: str) -> int:
    """Enter the rights of a person who signed in through the provider."""


@script("create_account", "api")
def create_account(name: str, entry: str, project: str) -> int:
    """Enter a service account under a name that is no key's yet."""


@script("switch_account", "api")
def switch_account(name: str, entry: str, disabled: int) -> int:
    """Disable or enable a service account with all of its keys."""


@script("delete_account", "api")
def delete_account(name: str) -> int:
    """Delete a service account; return how many keys were revoked with it."""


@script("look_up_key", "api")
def look_up_key(key_id: str) -> tuple[str, str, str, str]:
    """Return a key's entry, its last use, the pepper and its owner's role; empty if there is none."""


@script("enter_key", "api")
def enter_key(*, key_id: str, entry: str, project: str, owner: str, role: str, holder: str) -> int:
    """Enter a key, and make its owner a member of its project as far as that is needed."""


@script("set_member", "api")
def set_member(project: str, owner: str, role: str) -> int:
    """Give the owner of keys a role in a project, or take it away."""


@script("delete_project", "api")
def delete_project(project: str) -> int:
    """Forget a project that has no jobs, uploads, keys, accounts or webhooks."""


@script("add_upload", "api")
def add_upload(project: str, file: str, entry: str) -> str:
    """Enter an upload; return its entry, empty if the project would exceed its quota."""


@script("describe_uploads", "api")
def describe_uploads(project: str, *files: str) -> list[tuple[str, int, list[str], str]]:
    """Return the last use of each upload, and the newest jobs that name it."""


@script("stale_uploads", "api")
def stale_uploads(before_ms: int, most: int) -> list[str]:
    """Return the names of uploads that were last used before a time of day."""


@script("forget_upload", "api")
def forget_upload(project: str, file: str, before_ms: int) -> int:
    """Forget an upload of a project; return 1 if no project has its content any more."""


@script("share", "api")
def share(job_id: str, project: str, wanted: str) -> Flat:
    """Let the members of another project read a job, or no longer; return its record."""


@script("begin_session", "api")
def begin_session(session: str, page: str, key_id: str, idle_ms: int, longest_ms: int) -> int:
    """Begin a session of a key."""


@script("use_session", "api")
def use_session(session: str, page: str, ticket: str, path: str, idle_ms: int) -> tuple[()] | tuple[str, str, str]:
    """Return entry, last use and owner's role of a session's key, and let the session live on; or nothing."""


@script("ended_credentials", "api")
def ended_credentials(*credentials: str) -> list[str]:
    """Return the credentials that are no longer valid."""


@script("count_within", "api")
def count_within(counter: str, window_ms: int) -> int:
    """Count one more in a window of time; return how many there were."""


@script("append_audit", "api")
def append_audit(number: int, previous: str, newest: str, *lines: str) -> tuple[int, str, str]:
    """Append entries that follow the newest; return how many there are, and the newest's number and hash."""


@script("settle_restored", "api")
def settle_restored(limits: str, cursor: str, most: int) -> list[str]:
    """Settle a piece of a restored backup's jobs; return the next piece's position, then the ids queued again."""


@script("add_webhook", "api")
def add_webhook(webhook: str, entry: str, most: int) -> int:
    """Keep a webhook."""


@script("delete_webhook", "api")
def delete_webhook(webhook: str) -> int:
    """Forget a webhook and its deliveries."""


@script("make_deliveries", "api")
def make_deliveries(change: str, keep_ms: int, most: int, *pieces: str) -> int:
    """Turn a noted change into deliveries; return 1 if this call made them."""


@script("due_deliveries", "api")
def due_deliveries(most: int, hold_ms: int) -> list[str]:
    """Take deliveries to be sent now: webhook or job, the webhook's JSON, the delivery's, and so on."""


@script("due_exports", "api")
def due_exports(most: int, hold_ms: int, live_hold_ms: int) -> list[str]:
    """Take exports to be made now: job and target, what is kept of it, whether the job goes on, and so on."""


@script("note_export", "api")
def note_export(*, limits: str, job_id: str, target: str, state: str, live: str, again_ms: int, event: str) -> int:
    """Keep the outcome of an export; return 1 if the job still exists."""


@script("note_delivery", "api")
def note_delivery(*, webhook: str, delivery: str, text: str, again_ms: int, succeeded: int, disable_ms: int) -> int:
    """Keep the outcome of a delivery; return 1 if its webhook is now disabled."""
