"""Lets a package bring its own model families, data sources, objectives, optimizers, learning-rate schedules, programs
and kinds of jobs.

Its author imports these names from ``trivet.plugins``: they stay.

A package declares its additions without importing torch, since the API reads the declaration too. Each is an entry
point, whose name jobs use::

    [project.entry-points."trivet.models"]
    gated-mlp = "example.declared:FAMILY"       # a ModelFamily
    [project.entry-points."trivet.data"]
    spirals = "example.declared:SOURCE"         # a DataSource
    [project.entry-points."trivet.objectives"]
    hinge = "example.declared:OBJECTIVE"        # an ObjectiveKind
    [project.entry-points."trivet.optimizers"]
    signum = "example.declared:OPTIMIZER"       # an OptimizerKind
    [project.entry-points."trivet.schedules"]
    triangle = "example.declared:SCHEDULE"      # a ScheduleKind
    [project.entry-points."trivet.programs"]
    allocator = "example.declared:PROGRAM"      # a ProgramKind
    [project.entry-points."trivet.kinds"]
    estimate = "example.declared:KIND"          # a JobKind

A declaration is a configuration class and the dotted name of a function that only ranks import. The class checks a
job's fields (unknown ones are refused) and answers the questions of the checks at submit. The built-in ones are
declared alike (``service.jobs.spec.families``, ``service.jobs.spec.data``, ``service.jobs.spec.objective``,
``service.jobs.spec.optimizer``, ``service.jobs.spec.rate``, ``service.jobs.kinds``) and are examples to read. A
family's module is a chain of blocks (``service.models.registry.Model``). Its divided layers are those of
``service.parallel.tensor``; whatever else holds parameters is wrapped in ``OnEveryRank`` there. A program is a
``service.models.program.Program``.

A package is the operator's choice: it runs with all rights of the service. An unusable package (a failed
import, a taken name, a wrong type) is logged and listed as unavailable, and stops nothing else.
"""

from service.jobs.plugins.configs import (
    IGNORED,
    Better,
    DataConfig,
    Evaluation,
    Features,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParameterGroup,
    Pattern,
    ProgramConfig,
    Reason,
    Samples,
    ScheduleConfig,
    Tokens,
    matches,
)
from service.jobs.plugins.declarations import (
    CheckContext,
    DataSource,
    JobKind,
    ModelFamily,
    ObjectiveKind,
    OptimizerKind,
    ProgramKind,
    ScheduleKind,
)
from service.jobs.records import Problem
from service.jobs.runtime import Completion, RunContext
from service.jobs.spec.common import CommonSpec, Dependency, FileId, ParallelSpec, Strict, disagreement

__all__ = [
    "IGNORED",
    "Better",
    "CheckContext",
    "CommonSpec",
    "Completion",
    "DataConfig",
    "DataSource",
    "Dependency",
    "Evaluation",
    "Features",
    "FileId",
    "JobKind",
    "ModelConfig",
    "ModelFamily",
    "ObjectiveConfig",
    "ObjectiveKind",
    "OptimizerConfig",
    "OptimizerKind",
    "ParallelSpec",
    "ParameterGroup",
    "Pattern",
    "Problem",
    "ProgramConfig",
    "ProgramKind",
    "Reason",
    "RunContext",
    "Samples",
    "ScheduleConfig",
    "ScheduleKind",
    "Strict",
    "Tokens",
    "disagreement",
    "matches",
]
