"""What torchrun and the ranks are started with: pure functions from a claim to arguments and environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from service.jobs.records import Claim
from service.jobs.rendezvous import VARIABLE as RENDEZVOUS
from workers.rendezvous import Rendezvous

_SECRET = re.compile(
    r"^TRIVET_|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|_KEY$|REDIS|BROKER|CELERY|VALKEY", re.IGNORECASE
)


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the service's own settings and without what looks like a secret."""
    return {name: value for name, value in environment.items() if not _SECRET.search(name)}


def torchrun_arguments(claim: Claim, meeting: Rendezvous, folder: Path, program: Sequence[str]) -> list[str]:
    """Arguments of ``torch.distributed.run``; ``program`` is ``-m MODULE`` or a script with its arguments.

    The rendezvous is :mod:`workers.folder_rendezvous`, which opens no port.
    """
    hosts = [share.host for share in claim.shares]
    host = hosts.index(claim.ref.host)
    return [
        f"--nnodes={len(hosts)}",
        f"--nproc-per-node={len(claim.share.devices)}",
        f"--rdzv-id={claim.ref.job_id}-{claim.ref.attempt}",
        "--rdzv-backend=folder",
        f"--rdzv-endpoint={meeting.folder}",
        f"--rdzv-conf=host={host},address={meeting.address}",
        "--max-restarts=0",
        "--monitor-interval=0.05",
        f"--log-dir={folder}",
        *program,
    ]


def rank_environment(
    claim: Claim, meeting: Rendezvous, data: Path, events: Path, *, cores: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """What the ranks find besides what torchrun sets. ``environment`` is the supervisor's own."""
    share = claim.share
    variables = {
        "TRIVET_JOB": claim.ref.job_id,
        "TRIVET_ATTEMPT": str(claim.ref.attempt),
        "TRIVET_DATA": str(data),
        "TRIVET_EVENTS": str(events),
        "TRIVET_DEVICE": share.pool,
        RENDEZVOUS: str(meeting.folder),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible_devices(share.devices if share.pool == "cuda" else (), environment),
        "PYTHONSAFEPATH": "1",
        **_network(claim, meeting, environment),
    }
    if "OMP_NUM_THREADS" not in environment:
        variables["OMP_NUM_THREADS"] = str(max(1, cores // len(share.devices)))
    return variables


def _network(claim: Claim, meeting: Rendezvous, environment: Mapping[str, str]) -> dict[str, str]:
    """Where gloo and NCCL may listen: on the one interface that reaches the gang's other hosts, or, for a gang, on
    those that the operator named; on one host on no other than loopback. NCCL's status service (RAS) stays off.
    """
    variables = {"GLOO_SOCKET_IFNAME": meeting.interface, "NCCL_SOCKET_IFNAME": f"={meeting.interface}"}
    if len(claim.shares) > 1:
        variables = {name: environment.get(name, value) for name, value in variables.items()}
    return {**variables, "NCCL_RAS_ENABLE": "0"}


def visible_devices(devices: Sequence[int], environment: Mapping[str, str]) -> str:
    """``CUDA_VISIBLE_DEVICES`` for granted indices, which count within what this host's worker itself may see."""
    outer = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if outer is None else [name.strip() for name in outer.split(",")]
    return ",".join(str(index) if names is None else names[index] for index in devices)
