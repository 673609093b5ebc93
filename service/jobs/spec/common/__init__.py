"""Defines what every job's spec has, whatever its kind, and the words that specs and records share."""

from service.jobs.spec.common.base import (
    FILE_ID,
    ID_EXPECTED,
    JOB_ID,
    PARALLEL_DIMENSIONS,
    TOO_MANY_ERRORS,
    CommonSpec,
    Dependency,
    FewErrors,
    FileId,
    FileReference,
    IdsByName,
    JobId,
    ParallelSpec,
)
from service.jobs.spec.common.halving import Halving
from service.jobs.spec.common.launcher_names import LAUNCHER_NAME, LOCAL, PendingLaunch, launchers, unknown_launcher
from service.jobs.spec.common.median_rule import MedianRule
from service.jobs.spec.common.notify import (
    OFFLINE,
    ExportTargets,
    NotifySpec,
    WebhookFormat,
    check_receiver,
    check_sendable,
    leads_to_a_server,
)
from service.jobs.spec.common.states import ACTIVE, MOVES, STATES, TERMINAL, JobState
from service.jobs.spec.common.stopping import AnyRule
from service.jobs.spec.common.stopping_plan import Standing, StoppedJob, judge
from service.jobs.spec.common.stopping_rule import MOST_FOLLOWED, Reported, StoppingRule
from service.jobs.spec.common.strict import DISAGREEMENT, Recorded, Strict, disagreement
from service.jobs.spec.common.sweep import RangeSpec, SweepSpec

__all__ = [
    "ACTIVE",
    "DISAGREEMENT",
    "FILE_ID",
    "ID_EXPECTED",
    "JOB_ID",
    "LAUNCHER_NAME",
    "LOCAL",
    "MOST_FOLLOWED",
    "MOVES",
    "OFFLINE",
    "PARALLEL_DIMENSIONS",
    "STATES",
    "TERMINAL",
    "TOO_MANY_ERRORS",
    "AnyRule",
    "CommonSpec",
    "Dependency",
    "ExportTargets",
    "FewErrors",
    "FileId",
    "FileReference",
    "Halving",
    "IdsByName",
    "JobId",
    "JobState",
    "MedianRule",
    "NotifySpec",
    "ParallelSpec",
    "PendingLaunch",
    "RangeSpec",
    "Recorded",
    "Reported",
    "Standing",
    "StoppedJob",
    "StoppingRule",
    "Strict",
    "SweepSpec",
    "WebhookFormat",
    "check_receiver",
    "check_sendable",
    "disagreement",
    "judge",
    "launchers",
    "leads_to_a_server",
    "unknown_launcher",
]
