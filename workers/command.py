"""What torchrun and the ranks are started with: pure functions from a claim to arguments and environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.jobs.records import Claim

_SECRET = re.compile(
    r"^TRIVET_|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|_KEY$|REDIS|BROKER|CELERY|VALKEY", re.IGNORECASE
)


@dataclass(frozen=True)
class Rendezvous:
    """Where the launchers of a gang meet. Port 0, for a single host, lets torchrun take a free one."""

    address: str
    port: int
    leads: bool


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the service's own settings and without what looks like a secret."""
    return {name: value for name, value in environment.items() if not _SECRET.search(name)}


def torchrun_arguments(
    claim: Claim, meeting: Rendezvous, own_address: str, folder: Path, program: Sequence[str]
) -> list[str]:
    """Arguments of ``torch.distributed.run``; ``program`` is ``-m MODULE`` or a script with its arguments."""
    hosts = [share.host for share in claim.shares]
    return [
        f"--nnodes={len(hosts)}",
        f"--node-rank={hosts.index(claim.ref.host)}",
        f"--nproc-per-node={len(claim.share.devices)}",
        f"--rdzv-id={claim.ref.job_id}-{claim.ref.attempt}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={meeting.address}:{meeting.port}",
        f"--rdzv-conf=is_host={int(meeting.leads)}",
        f"--local-addr={own_address}",
        "--max-restarts=0",
        "--monitor-interval=0.05",
        f"--log-dir={folder}",
        *program,
    ]


def rank_environment(
    claim: Claim, data: Path, events: Path, cores: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """What the ranks find besides what torchrun sets. ``environment`` is the supervisor's own."""
    share = claim.share
    variables = {
        "TRIVET_JOB": claim.ref.job_id,
        "TRIVET_ATTEMPT": str(claim.ref.attempt),
        "TRIVET_DATA": str(data),
        "TRIVET_EVENTS": str(events),
        "TRIVET_DEVICE": share.pool,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible_devices(share.devices if share.pool == "cuda" else (), environment),
        "PYTHONSAFEPATH": "1",
    }
    if "OMP_NUM_THREADS" not in environment:
        variables["OMP_NUM_THREADS"] = str(max(1, cores // len(share.devices)))
    return variables


def visible_devices(devices: Sequence[int], environment: Mapping[str, str]) -> str:
    """``CUDA_VISIBLE_DEVICES`` for granted indices, which count within what this host's worker itself may see."""
    outer = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if outer is None else [name.strip() for name in outer.split(",")]
    return ",".join(str(index) if names is None else names[index] for index in devices)
