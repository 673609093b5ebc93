"""Meshes for functions that ranks run."""

from __future__ import annotations

from service.jobs.spec.common import ParallelSpec
from service.parallel import distributed
from service.parallel.mesh import Mesh, build


def start_mesh(**degrees: int) -> Mesh:
    """Join the group that the ranks were started in, on the CPU, and divide it by these degrees."""
    distributed.start("cpu")
    return build(ParallelSpec(**degrees), "cpu")
