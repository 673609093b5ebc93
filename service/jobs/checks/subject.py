"""What is checked, and how a spec's other jobs are looked up."""

from __future__ import annotations

from collections.abc import Callable

from service.jobs.records import Job
from service.jobs.spec import CompileSpec, TrainSpec, VerifySpec

AnySpec = TrainSpec | VerifySpec | CompileSpec
Lookup = Callable[[str], Job | None]
