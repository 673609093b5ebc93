"""Builds the stored data of a submitted job: its record, its indexes, and the hash that tells two submissions apart."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from functools import cached_property

from service.jobs.accounts import owner_in
from service.jobs.checks.dependencies import files_of
from service.jobs.spec.common import LOCAL, CommonSpec
from service.jobs.store.decode import json_of
from service.jobs.text import folded
from service.jobs.tracing import current_traceparent

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_RANDOM_CHARACTERS = 11


def _notice_fields(spec: CommonSpec) -> dict[str, str]:
    """Return the form of ``notify`` in a job's record: the URL, the states, each between spaces, and the form."""
    if spec.notify is None:
        return {}
    told = {"notify": spec.notify.webhook, "notify_on": f" {' '.join(spec.notify.on)} "}
    return told | ({} if spec.notify.format == "standard" else {"notify_format": spec.notify.format})


@dataclass(frozen=True)
class Submission:
    """A spec that its owner submits; ``path`` is its place in the request's body, ``idem`` the digest of the
    idempotency key, empty without one.
    """

    path: str
    spec: CommonSpec
    owner: str
    project: str
    text: str
    idem: str
    body_hash: str
    launcher: str = LOCAL

    def entry(self) -> dict[str, object]:
        """Return the fields that the script of submission reads."""
        return {
            "idem": self.idem,
            "body_hash": self.body_hash,
            "suffix": _suffix(),
            "record": self.record(),
            "indexes": self.indexes,
            "after": self.needed,
            "weights": self.only_for_weights,
            "files": self.uploads,
        }

    @property
    def checked_for(self) -> str:
        """Return the name that tells its owner from all others."""
        return owner_in(self.project, self.owner)

    @cached_property
    def uploads(self) -> list[str]:
        """Return the uploaded files that the spec names."""
        return uploads_of(self.spec)

    @cached_property
    def needed(self) -> list[str]:
        """Return the jobs that the spec names."""
        return list(dict.fromkeys(dependency.job_id for dependency in self.spec.dependencies()))

    @cached_property
    def only_for_weights(self) -> list[str]:
        """Return the jobs that need not succeed: the spec takes only weights that they have left."""
        others = {dependency.job_id for dependency in self.spec.dependencies() if dependency.weights is None}
        return [job_id for job_id in self.needed if job_id not in others]

    @cached_property
    def indexes(self) -> list[str]:
        """Return the indexes that contain the job for as long as its record exists."""
        spec, project = self.spec, self.project
        labels = [index for key, value in spec.labels.items() for index in (f"label:{key}", f"label:{key}={value}")]
        files = [f"file:{project}/{file_id}" for file_id in self.uploads]
        needs = [f"needs:{job_id}" for job_id in self.needed]
        return [
            f"kind:{spec.kind}",
            f"owner:{self.owner}",
            *labels,
            *files,
            *needs,
            f"project:{project}",
            f"visible:{project}",
        ]

    def record(self) -> dict[str, str]:
        """Return the fields of the job's hash that submission sets, all of them strings."""
        spec = self.spec
        ranks = spec.parallel.world_size
        is_local = self.launcher == LOCAL
        return {
            "kind": spec.kind,
            "name": spec.name or spec.kind,
            "labels": json_of(spec.labels),
            "folded": folded(f"{spec.name or spec.kind} {json_of(spec.labels)}"),
            "owner": self.owner,
            "project": self.project,
            "priority": str(spec.priority),
            "retries": str(spec.retries),
            "preemptible": "1" if spec.preemptible else "",
            "timeout_s": "" if spec.timeout_s is None else str(spec.timeout_s),
            "parallel": spec.parallel.model_dump_json(),
            # A launcher's jobs name no device, so that no version of placement finds one for them.
            "shape": f"{spec.device if is_local else self.launcher}:{ranks}:{min(spec.max_hosts, ranks)}",
            **({} if is_local else {"launcher": self.launcher, "device": spec.device}),
            "after": json_of(self.needed),
            "weights": json_of(self.only_for_weights),
            "indexes": json_of(self.indexes),
            "spec": self.text,
            "exports": " ".join(spec.export.chosen()),
            "traceparent": current_traceparent() or "",
            **_notice_fields(spec),
        }


def _suffix() -> str:
    """Return the random characters that end an id."""
    number, characters = secrets.randbelow(len(_ALPHABET) ** _RANDOM_CHARACTERS), []
    for _ in range(_RANDOM_CHARACTERS):
        number, digit = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[digit])
    return "".join(characters)


def hashed(*texts: str) -> str:
    hashed = hashlib.sha256()
    for text in texts:
        hashed.update(text.encode())
    return hashed.hexdigest()


def uploads_of(spec: CommonSpec) -> list[str]:
    return list(dict.fromkeys(file_id for _, file_id in files_of(spec)))
