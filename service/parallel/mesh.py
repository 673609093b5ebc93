"""Defines the mesh: every rank's part, as one frozen value.

Ranks are laid out with ``tp`` fastest, then ``dp_shard``, ``dp_replicate`` and ``pp`` slowest: the collectives that
run most often stay among neighbouring devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from service.jobs.spec.common import PARALLEL_DIMENSIONS, ParallelSpec
from service.parallel.distributed import rank_and_size


class MeshError(ValueError):
    """The ranks that were started cannot form the requested mesh."""


@dataclass(frozen=True)
class Axis:
    """One parallel dimension seen from this rank.

    ``group`` names the process group that spans the dimension; it is empty when ``size`` is 1.
    """

    size: int = 1
    rank: int = 0
    group: str = ""


SINGLE = Axis()


@dataclass(frozen=True)
class PaddedAxis(Axis):
    """An axis over which a dimension of ``length`` is divided that need not be a multiple of its size.

    Every rank has room for ``share`` places; those behind the end of the dimension, on the last ranks, are padding.
    """

    length: int = 0

    @property
    def share(self) -> int:
        return -(-self.length // self.size)

    @property
    def own(self) -> int:
        """Return how many of this rank's places are real."""
        return max(min(self.length - self.rank * self.share, self.share), 0)

    @property
    def is_padded(self) -> bool:
        return self.length % self.size > 0


def padded(axis: Axis, length: int) -> PaddedAxis:
    """Return ``axis`` as it divides a dimension of ``length``."""
    return PaddedAxis(axis.size, axis.rank, axis.group, length)


@dataclass(frozen=True)
class Mesh:
    """This rank's place among the ranks of a job.

    ``device_mesh`` has the dimensions ``pp, dp_replicate, dp_shard, tp`` (size 1 included). It is ``None`` in a
    process without a group, and in a *planned* mesh, which describes a rank for tracing without any peer.
    ``dp`` joins both data-parallel dimensions.
    """

    spec: ParallelSpec
    rank: int
    device_type: str
    device_mesh: DeviceMesh | None
    pp: Axis
    dp_replicate: Axis
    dp_shard: Axis
    dp: Axis
    tp: Axis

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """Return the 1-D mesh that tensor-parallel parameters live on; ``None`` when they are plain tensors."""
        return self.device_mesh["tp"] if self.device_mesh is not None and self.tp.size > 1 else None

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """Return the mesh for ``fully_shard``: ``(dp_shard,)``, or ``(dp_replicate, dp_shard)`` for HSDP."""
        if self.device_mesh is None:
            return None
        return (
            self.device_mesh["dp_replicate", "dp_shard"] if self.dp_replicate.size > 1 else self.device_mesh["dp_shard"]
        )

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Return the global ranks of this rank's pipeline, first stage first."""
        return tuple(self.rank + (index - self.pp.rank) * self.spec.dp * self.spec.tp for index in range(self.pp.size))

    def group_of_stages(self, first: int, last: int) -> str:
        """Make the groups of these two ranks of each pipeline; return the name of this rank's, empty if it is in none.

        Every rank of the job calls it. It is empty, too, if both are one rank.
        """
        if first == last:
            return ""
        if self.pp.size == 2:
            return self.pp.group
        inner = self.spec.dp * self.spec.tp
        members = [[first * inner + place, last * inner + place] for place in range(inner)]
        group, _ = dist.new_subgroups_by_enumeration(members)  # type: ignore[no-untyped-call,unused-ignore]
        return "" if group is None else str(group.group_name)


def coordinates(spec: ParallelSpec, rank: int) -> dict[str, int]:
    """Return the position of a global rank along each dimension."""
    position = {}
    for name in reversed(PARALLEL_DIMENSIONS):
        rank, position[name] = divmod(rank, getattr(spec, name))
    return position


def plan(spec: ParallelSpec, rank: int = 0, device_type: str = "cpu") -> Mesh:
    """Return the mesh as ``rank`` would see it, without processes: for building and tracing one rank's part of a model.

    Its groups have names that no process group bears, so a collective cannot run by mistake.
    """
    if not 0 <= rank < spec.world_size:
        raise MeshError(f"rank {rank} is outside {spec.arithmetic} ranks")
    axes = {
        name: _axis(spec, rank, name, f"planned/{name}" if getattr(spec, name) > 1 else "")
        for name in PARALLEL_DIMENSIONS
    }
    dp = _data_axis(spec, axes, "planned/dp" if spec.dp > 1 else "")
    return Mesh(spec, rank, device_type, None, dp=dp, **axes)


def build(spec: ParallelSpec, device_type: str) -> Mesh:
    """Return the mesh over the started ranks; every rank must call it.

    Raises :class:`MeshError` with the arithmetic when the number of ranks is not the product of the degrees.
    """
    rank, started = rank_and_size()
    if started != spec.world_size:
        raise MeshError(f"{spec.arithmetic} ranks were asked for, but {started} were started")
    if not dist.is_initialized():
        return plan(spec, 0, device_type)
    sizes = tuple(getattr(spec, name) for name in PARALLEL_DIMENSIONS)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=PARALLEL_DIMENSIONS)
    axes = {name: _axis(spec, rank, name, _group_name(device_mesh, name)) for name in PARALLEL_DIMENSIONS}
    dp = _data_axis(spec, axes, _data_group(spec, axes))
    return Mesh(spec, rank, device_type, device_mesh, dp=dp, **axes)


def _axis(spec: ParallelSpec, rank: int, name: str, group: str) -> Axis:
    return Axis(getattr(spec, name), coordinates(spec, rank)[name], group)


def _data_axis(spec: ParallelSpec, axes: dict[str, Axis], group: str) -> Axis:
    return Axis(spec.dp, axes["dp_replicate"].rank * spec.dp_shard + axes["dp_shard"].rank, group)


def _group_name(device_mesh: DeviceMesh, name: str) -> str:
    return str(device_mesh.get_group(name).group_name) if device_mesh[name].size() > 1 else ""


def _data_group(spec: ParallelSpec, axes: dict[str, Axis]) -> str:
    """Return the name of the group over both data-parallel dimensions, a new one only if neither's own will do."""
    if spec.dp_replicate == 1 or spec.dp_shard == 1:
        return axes["dp_replicate"].group or axes["dp_shard"].group
    members = [
        [(pp * spec.dp + dp) * spec.tp + tp for dp in range(spec.dp)]
        for pp, tp in product(range(spec.pp), range(spec.tp))
    ]
    group, _ = dist.new_subgroups_by_enumeration(members)  # type: ignore[no-untyped-call,unused-ignore]
    return str(group.group_name)
