"""Lists the faults of a chaos run: the signals to each part, and how often they are drawn."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from chaos_service import Role

_KILL, _TERM, _STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP


@dataclass(frozen=True)
class Fault:
    """A signal to a process by role; ``stopped_s`` is how long SIGSTOP lasts, ``weight`` how often it is drawn."""

    role: Role
    signal: signal.Signals
    weight: int
    stopped_s: float = 0.0


def faults(lease_s: float, launcher: str, only: Sequence[str]) -> list[Fault]:
    """Return every fault that a run may draw. ``only`` has roles, or ``role:SIGNAL``, and is empty for all."""
    found = [*_of_trivet(lease_s), *_of_clusters(lease_s)[launcher]]
    return [fault for fault in found if not only or fault.role in only or f"{fault.role}:{fault.signal.name}" in only]


def _of_trivet(lease_s: float) -> list[Fault]:
    longer, shorter = lease_s + 4, lease_s / 2
    return [
        Fault("up", _KILL, 1),
        Fault("up", signal.SIGUSR1, 2),  # every part is restarted in turn
        *(Fault("api", *how) for how in ((_KILL, 3), (_TERM, 2), (_STOP, 1, longer))),
        *(Fault("agent", *how) for how in ((_KILL, 4), (_TERM, 3), (_STOP, 2, longer))),
        *(Fault("broker", *how) for how in ((_KILL, 3), (_TERM, 2), (_STOP, 2, 4.0), (_STOP, 1, longer))),
        *(Fault("supervisor", *how) for how in ((_KILL, 5), (_TERM, 2), (_STOP, 3, longer), (_STOP, 2, shorter))),
        *(Fault("fork server", *how) for how in ((_KILL, 1), (_STOP, 1, 12.0))),
        *(Fault("rank", *how) for how in ((_KILL, 5), (_TERM, 3), (_STOP, 2, longer))),
        *(Fault("launcher", *how) for how in ((_KILL, 2), (_TERM, 1))),
        *(Fault("keeper", *how) for how in ((_KILL, 2), (_TERM, 1), (_STOP, 1, longer))),
    ]


def _of_clusters(lease_s: float) -> dict[str, list[Fault]]:
    """Return the further faults of a run whose devices a cluster gives."""
    longer = lease_s + 4
    hosts = [Fault("allocated host", *how) for how in ((_KILL, 3), (_TERM, 3), (_STOP, 1, longer))]
    return {
        "local": [],
        "slurm": [
            *hosts,
            *(Fault("slurmctld", *how) for how in ((_KILL, 3), (_STOP, 1, longer))),
            *(Fault("slurmd", *how) for how in ((_KILL, 3), (_STOP, 1, longer))),
        ],
        "ray": [
            *hosts,
            *(Fault("raylet", *how) for how in ((_KILL, 3), (_STOP, 1, longer))),
            *(Fault("gcs_server", *how) for how in ((_KILL, 1), (_STOP, 1, longer))),
            *(Fault("ray job", *how) for how in ((_KILL, 2), (_TERM, 2))),
            Fault("ray bundle", _KILL, 2),
        ],
    }
