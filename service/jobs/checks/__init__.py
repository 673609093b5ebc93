"""Checks of a whole spec at submit: everything that can be known before a device is touched.

A spec that passes pydantic is well-formed; these rules ask whether its parts fit each other, the jobs that it names
and the fleet: one file per concern. Pure: the fleet and the other jobs are given.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.jobs.checks.batch import check_batch
from service.jobs.checks.dependencies import Dependency, check_archive, check_dependencies, dependencies, resolve
from service.jobs.checks.files import HasFile, check_files
from service.jobs.checks.fit import check_fit
from service.jobs.checks.fleet import check_fleet, pool_of
from service.jobs.checks.gate import check_gate
from service.jobs.checks.mesh import check_mesh
from service.jobs.checks.names import check_names
from service.jobs.checks.objective import check_objective
from service.jobs.checks.pipeline import check_pipeline
from service.jobs.checks.program import check_program
from service.jobs.checks.queries import PathOf, check_queries
from service.jobs.checks.subject import AnySpec, Lookup, Uploaded
from service.jobs.records import Problem

__all__ = ["Dependency", "check", "dependencies", "pool_of"]


def check(
    spec: AnySpec,
    fleet_capacity: Mapping[str, int] | None,
    lookup: Lookup,
    has_file: HasFile = lambda _: True,
    uploaded: Uploaded = lambda _: None,
    *,
    path_of: PathOf = lambda _: None,
) -> list[Problem]:
    """Every reason why this job could never run; empty when there is none.

    ``fleet_capacity`` counts the devices of the known hosts by pool (``cuda``, ``cpu``); ``None``: no host is known.
    ``has_file`` tells whether a file was uploaded, by its id; ``uploaded`` what model an archive holds;
    ``path_of`` where the content of an uploaded file is.
    """
    config = resolve(spec.model, lookup, uploaded) if spec.model is not None else None
    return [
        *check_names(spec),
        *check_dependencies(spec, lookup),
        *check_files(spec, has_file),
        *check_archive(spec, uploaded),
        *check_gate(spec, config, lookup, uploaded),
        *check_mesh(spec, config),
        *check_fit(spec, config),
        *check_queries(spec, config, path_of),
        *check_objective(spec),
        *check_batch(spec),
        *check_pipeline(spec),
        *check_program(spec),
        *check_fleet(spec, fleet_capacity),
    ]
