"""The check of a whole spec."""

from __future__ import annotations

from service.jobs.checks.dependencies import check_dependencies
from service.jobs.checks.files import check_files
from service.jobs.checks.fleet import check_fleet
from service.jobs.checks.names import check_names
from service.jobs.kinds.registry import KINDS
from service.jobs.plugins import CheckContext, CommonSpec
from service.jobs.records import Problem


def check(spec: CommonSpec, context: CheckContext) -> list[Problem]:
    """Return every reason why this job could never run; none if there is no such reason."""
    return [
        *check_names(spec),
        *check_dependencies(spec, context),
        *check_files(spec, context),
        *KINDS.declaration(spec.kind).check(spec, context),
        *check_fleet(spec, context),
    ]
