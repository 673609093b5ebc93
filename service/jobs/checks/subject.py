"""What is checked, and how a spec's other jobs are looked up."""

from __future__ import annotations

from collections.abc import Callable

from service.jobs.plugins import ModelConfig
from service.jobs.records import Job
from service.jobs.spec import CompileSpec, TrainSpec, VerifySpec

AnySpec = TrainSpec | VerifySpec | CompileSpec
Lookup = Callable[[str], Job | None]
Uploaded = Callable[[str], ModelConfig | None]
"""From the id of an uploaded archive to the model's configuration in it; ``ValueError`` where it holds none that
we can take, ``None`` where nothing is known of it.
"""
