"""Applies the operator's limits on jobs to one attempt."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from service.jobs.events import rank_file
from service.jobs.files import OF_OWNER, DataLayout, Folder
from service.jobs.host import config_file
from service.jobs.plugins.declarations import GROUPS
from service.jobs.records import Claim
from service.jobs.settings import MAX_LOG_BYTES, Settings
from workers.launcher.confinement import Confinement, JobLimits, Mode
from workers.rank.stacks import stacks_file

_NEEDED_BY_CODE = ("files", "broker", "network")
"""Parts of a confinement that keep code of a job's author from other jobs and from the network."""


@dataclass(frozen=True)
class JobPolicy:
    """Holds the limits in the settings of the host's worker."""

    isolation: Mode = "auto"
    limits: JobLimits = field(default_factory=JobLimits)
    """Their niceness is for ranks on CPU slots: the host threads of GPU jobs keep the weight of the service."""
    environment: tuple[str, ...] = ()
    """Names of variables that ranks get besides those of :func:`workers.supervisor.command.allowed`."""
    read: tuple[str, ...] = ()
    """What ranks may read besides the system, the installed packages and what their spec names."""
    secret: tuple[str, ...] = ()
    """Files that ranks never need: settings, keys of certificates, passwords."""
    most_log_bytes: int = MAX_LOG_BYTES
    """The bytes of one rank's output that an attempt keeps."""

    @classmethod
    def of(cls, settings: Settings) -> JobPolicy:
        secret = (
            config_file(),
            settings.tls_key,
            settings.admin_key_path,
            settings.broker_password_file,
            settings.broker_tls_key,
        )
        return cls(
            isolation=settings.job_isolation,
            limits=JobLimits(
                settings.job_memory_gib, settings.job_file_gib, settings.job_processes, settings.cpu_niceness
            ),
            environment=tuple(name for name in settings.job_environment.split(",") if name),
            read=tuple(path for path in settings.job_paths.split(":") if path),
            secret=tuple(str(path.resolve()) for path in secret if path is not None),
            most_log_bytes=settings.max_log_bytes,
        )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> JobPolicy:
        return cls(
            fields["isolation"],
            JobLimits(**fields["limits"]),
            tuple(fields["environment"]),
            tuple(fields["read"]),
            tuple(fields["secret"]),
            fields["most_log_bytes"],
        )

    def confine(
        self,
        claim: Claim,
        layout: DataLayout,
        broker_url: str,
        *,
        read: Iterable[Path],
        write: Iterable[Path],
        owner: str = "",
    ) -> Confinement:
        """Return the confinement of a claimed part's ranks.

        They read their job's folder and the files that its submission named. They write artifacts, checkpoints, their
        work folder and the files of their events and stacks, and in ``owner``'s cache of files derived from
        uploads. ``read`` and ``write`` are the group's own paths.
        """
        read = [*map(Path, self.read), *plugins(), *read]
        read += map(layout.file, claim.files)
        for needed in claim.sources:
            read += [layout.job(needed.job_id).artifacts, layout.job(needed.job_id).checkpoints]
        job = layout.job(claim.ref.job_id)
        attempt = job.attempt(claim.ref.attempt)
        files = [name(attempt, rank) for rank in claim.ranks for name in (rank_file, stacks_file)]
        read.append(job.root)
        write = [job.artifacts, job.checkpoints, job.work(claim.ref.attempt), *files, *write]
        covered = [layout.root, *_broker_folder(broker_url, [*write, Path(tempfile.gettempdir())])]
        return Confinement(
            mode=self.isolation,
            limits=self.limits if claim.share.pool == "cpu" else replace(self.limits, niceness=0),
            read=tuple(map(str, read)),
            write=tuple(map(str, write)),
            private=(str(_make_cache(layout, owner)),),
            secret=(*self.secret, *map(str, covered)),
            covered=tuple(map(str, covered)),
            own_network=len(claim.shares) == 1,
            needs=_NEEDED_BY_CODE if claim.spec.brings_code else (),
            cuda=claim.share.pool == "cuda",
        )


def _make_cache(layout: DataLayout, owner: str) -> Path:
    """Return the owner's cache of files derived from uploads, and make it if there is none."""
    layout.cache.mkdir(parents=True, exist_ok=True)
    own = OF_OWNER + hashlib.sha256(owner.encode()).hexdigest()[:32]
    with Folder.open(layout.cache) as cache:
        cache.make(own, 0o700).close()
    return layout.cache / own


@cache
def plugins() -> tuple[Path, ...]:
    """Return the folders of packages that extend Trivet; one under development is outside the installation.

    A search of all packages takes as long as a fork, so a process does it once; a fork server ends when a
    package changes.
    """
    places: list[Path] = []
    for group in GROUPS:
        for point in entry_points(group=group):
            found = find_spec(point.module.partition(".")[0])
            if found is not None:
                places += map(Path, found.submodule_search_locations or filter(None, [found.origin]))
    return tuple(places)


def _broker_folder(broker_url: str, needed: list[Path]) -> Iterator[Path]:
    """Yield the folder of the broker's socket, or only the socket if the folder also holds files that ranks need."""
    parts = urlsplit(broker_url)
    if parts.scheme == "unix":
        socket = Path(parts.path)
        shared = any(path.resolve().is_relative_to(socket.parent.resolve()) for path in needed)
        yield socket if shared else socket.parent
