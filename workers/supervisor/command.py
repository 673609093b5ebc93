"""Plans the arguments and environment of torchrun and the ranks: pure functions of a claim."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from service.jobs.runtime import HOST_CACHE
from service.jobs.runtime import VARIABLE as RENDEZVOUS

if TYPE_CHECKING:  # a supervisor takes `allowed` from here before its launcher starts, which should be soon
    from service.jobs.records import Claim
    from workers.supervisor.attempt_folder import Rendezvous

_ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|PYTHON(PATH|HOME|HASHSEED|UNBUFFERED|DONTWRITEBYTECODE|WARNINGS|UTF8|IOENCODING|SAFEPATH|MALLOC)"
    r"|(CUDA|NVIDIA|NCCL|GLOO|UCX|OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON)_\w+"
)
"""Names of variables that a rank may need. Any other variable may hold a secret."""
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|AUTH|_KEY$|_PAT$|_URL$", re.IGNORECASE)
_OWN = re.compile(r"TRIVET_", re.IGNORECASE)


def allowed(environment: Mapping[str, str], more: Collection[str] = ()) -> dict[str, str]:
    """Return the part of ``environment`` that ranks get: variables of programs, compilers and torch's libraries, and
    those that the operator adds. It never has the service's own settings.
    """
    return {
        name: value
        for name, value in environment.items()
        if not _OWN.match(name) and (name in more or (_ALLOWED.fullmatch(name) and not _SECRET.search(name)))
    }


def torchrun_arguments(claim: Claim, meeting: Rendezvous, folder: Path, program: Sequence[str]) -> list[str]:
    """Return the arguments of ``torch.distributed.run``; ``program`` is ``-m MODULE`` or a script with its arguments.

    The rendezvous is :mod:`workers.launcher.folder_rendezvous`, which opens no port.
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
        "--monitor-interval=0.02",
        f"--log-dir={folder}",
        *program,
    ]


@dataclass(frozen=True)
class GroupPaths:
    """Names the files and folders of a group's ranks on their host."""

    data: Path
    events: Path
    """The socket of their supervisor."""
    secret: str
    """The secret by which a rank identifies itself there."""
    scratch: Path
    """Temporary files and the home folders of libraries; removed when the attempt ends."""
    compiled: Path
    """Caches of compiled code and of traces."""


def rank_environment(
    claim: Claim,
    meeting: Rendezvous,
    places: GroupPaths,
    *,
    threads: int,
    environment: Mapping[str, str],
    more: Collection[str] = (),
) -> dict[str, str]:
    """Return the variables of the ranks' environment beside torchrun's. ``environment`` is the supervisor's own; a rank
    computes with ``threads`` threads unless it says otherwise. ``more`` names variables of it that the operator adds to
    those of :func:`allowed`.
    """
    share = claim.share
    variables = {
        **allowed({name: value for name, value in environment.items() if name in more}, more),
        "TRIVET_JOB": claim.ref.job_id,
        "TRIVET_ATTEMPT": str(claim.ref.attempt),
        "TRIVET_DATA": str(places.data),
        "TRIVET_EVENTS": str(places.events),
        "TRIVET_EVENTS_SECRET": places.secret,
        "TRIVET_DEVICE": share.pool,
        RENDEZVOUS: str(meeting.folder),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": _visible_devices(share.devices if share.pool == "cuda" else (), environment),
        "PYTHONSAFEPATH": "1",
        "HOME": str(places.scratch),
        "TMPDIR": str(places.scratch),
        HOST_CACHE: str(places.compiled),
        "TORCHINDUCTOR_CACHE_DIR": str(places.compiled / "inductor"),
        "TRITON_CACHE_DIR": str(places.compiled / "triton"),
        **_network(claim, meeting, environment),
    }
    if "OMP_NUM_THREADS" not in environment:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables


def _network(claim: Claim, meeting: Rendezvous, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say where gloo and NCCL may listen: on the interface that reaches the gang's other
    hosts, or, for a gang, on those that the operator named; on one host only on loopback.

    NCCL's status service (RAS) stays off.
    """
    variables = {"GLOO_SOCKET_IFNAME": meeting.interface, "NCCL_SOCKET_IFNAME": f"={meeting.interface}"}
    if len(claim.shares) > 1:
        variables = {name: environment.get(name, value) for name, value in variables.items()}
    return {**variables, "NCCL_RAS_ENABLE": "0"}


def _visible_devices(devices: Sequence[int], environment: Mapping[str, str]) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for granted indices, which count the devices that this host's worker may
    see.
    """
    outer = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if outer is None else [name.strip() for name in outer.split(",")]
    return ",".join(str(index) if names is None else names[index] for index in devices)
