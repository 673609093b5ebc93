"""Keeps an owner's compiled code from all other owners: a host's cache, and the artifacts of a gate."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from service.jobs.projects import DEFAULT_PROJECT
from service.jobs.records import Claim, Job
from service.jobs.store import Store


def gate_artifacts(store: Store, claim: Claim) -> tuple[str, dict[str, str]]:
    """Return the owner of the claimed job within its project, and SHA-256 by name of the artifacts of the job that its
    gate names, as their manifest has them: none where that job is another owner's. Raises
    :class:`service.jobs.store.StoreUnavailable`.
    """
    owner = _owner_of(store.jobs.get(claim.ref.job_id))
    gate = claim.spec.gate_job
    if gate is None or _owner_of(store.jobs.get(gate)) != owner:
        return owner, {}
    return owner, {artifact.name: artifact.sha256 for artifact in store.artifacts.list(gate) if artifact.sha256}


def _owner_of(job: Job) -> str:
    """Return one name per owner: the same name in two projects may be two people."""
    return job.owner if job.project == DEFAULT_PROJECT else f"{job.project}/{job.owner}"


def compiled_caches() -> Path:
    """Return the folder of all owners' caches on this host."""
    return Path(tempfile.gettempdir(), f"trivet-compiled-{os.geteuid()}")


def compile_cache(owner: str) -> Path:
    """Return a private folder, on this host, for code that the jobs of ``owner`` compiled.

    Torch's default is shared by all jobs, and has a name that another user may take first.
    """
    base = compiled_caches()
    folder = base / hashlib.sha256(owner.encode()).hexdigest()[:32]
    for path in (base, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
            return Path(tempfile.mkdtemp(prefix="trivet-compiled-"))
    return folder
