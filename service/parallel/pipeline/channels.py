"""Decides which process group carries which messages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
import torch.distributed as dist

from service.parallel.agreement import agree
from service.parallel.collectives import resolve
from service.parallel.mesh import Mesh
from service.parallel.pipeline.tags import Direction


@dataclass(frozen=True)
class Channels:
    """Groups by (sending pipeline rank, receiving pipeline rank, kind).

    gloo matches messages by tag, so one group carries all. NCCL matches in order per communicator, and a transfer
    that waits blocks those behind it: each direction between two ranks has a communicator of its own there, and
    the schedule's verifier proves that both sides use it in the same order.
    """

    ranks: tuple[int, ...]
    has_tags: bool
    groups: dict[tuple[int, int, Direction], dist.ProcessGroup]

    def group(self, sender: int, receiver: int, kind: Direction) -> dist.ProcessGroup:
        return self.groups[sender, receiver, kind]


def connect(mesh: Mesh, owners: Sequence[int]) -> Channels:
    """Return channels between the owners of neighbouring stages; every rank of the job must call it at the same point.

    Raises :class:`DisagreementError` on all of them if one names other owners.
    """
    agree({"the stages' owners": tuple(owners)})
    if not mesh.pp.group:
        return Channels(mesh.pp_ranks, has_tags=True, groups={})
    routes = _routes(owners)
    shared = resolve(mesh.pp.group)
    if mesh.device_type != "cuda":
        return Channels(mesh.pp_ranks, has_tags=True, groups=dict.fromkeys(routes, shared))
    return Channels(mesh.pp_ranks, has_tags=False, groups=_own_communicators(mesh, routes))


def _routes(owners: Sequence[int]) -> list[tuple[int, int, Direction]]:
    """Return every direction in use, once, in the same order on all ranks."""
    neighbours = {(lower, upper) for lower, upper in pairwise(owners) if lower != upper}
    forward = [(lower, upper, Direction.ACTIVATION) for lower, upper in sorted(neighbours)]
    backward = [(upper, lower, Direction.GRADIENT) for lower, upper in sorted(neighbours)]
    return forward + backward


def _own_communicators(
    mesh: Mesh, routes: Sequence[tuple[int, int, Direction]]
) -> dict[tuple[int, int, Direction], dist.ProcessGroup]:
    """Return a two-rank group for each route of each pipeline; all ranks help to make every one."""
    per_stage = mesh.spec.dp * mesh.spec.tp
    own = {}
    for pipeline, route in product(range(per_stage), routes):
        sender, receiver, _ = route
        group = dist.new_group(sorted(rank * per_stage + pipeline for rank in (sender, receiver)))
        if pipeline == mesh.rank % per_stage and mesh.pp.rank in (sender, receiver):
            own[route] = group
    _warm_up(mesh, own)
    return own


def _warm_up(mesh: Mesh, own: dict[tuple[int, int, Direction], dist.ProcessGroup]) -> None:
    """Send one number over each route, in the order that all ranks share.

    NCCL connects two ranks at their first transfer, and both hosts wait there for each other. In the midst of a
    schedule one of them may be behind a kernel that waits for the other: a deadlock.
    """
    number = torch.zeros(1, device=mesh.device_type)
    for (sender, receiver, _), group in own.items():
        if mesh.pp.rank == sender:
            dist.send(number, mesh.pp_ranks[receiver], group)
        else:
            dist.recv(number, mesh.pp_ranks[sender], group)
    torch.cuda.synchronize()
