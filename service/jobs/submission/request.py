"""Defines what a limited process is asked, as messages: whether a job could run, and how its pipeline would."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from service.formats.llama import uploaded_config
from service.jobs.checks.dependencies import Lookup, related
from service.jobs.kinds.registry import spec_adapter
from service.jobs.layout import DataLayout
from service.jobs.plan import Plan, plan
from service.jobs.plugins import CheckContext, CommonSpec, ModelConfig
from service.jobs.records import FleetCapacity, FrozenModel, Job, Problem
from service.jobs.spec.train import TrainSpec
from service.jobs.submission.check import check

_MOST_PROBLEMS = 100
"""In one answer; a job with more is refused for the first ones."""
_Opening = Callable[[str], None]
"""Told the id of each uploaded file before it is read."""
_plan_adapter: TypeAdapter[Plan | None] = TypeAdapter(Plan | None)


class CheckLimits(FrozenModel):
    """Bounds what one request may use: bytes of memory and seconds of processor time."""

    memory_bytes: int
    processor_s: int


class CheckRequest(FrozenModel):
    """Asks whether a job could run: its spec as JSON, and all that the check asks for besides, which is the fleet, the
    jobs that the spec names, and the folder of uploaded files.
    """

    asks: Literal["check"] = "check"
    spec: str
    fleet: FleetCapacity | None
    jobs: dict[str, Job]
    data: Path

    @classmethod
    def of(cls, spec: CommonSpec, fleet: FleetCapacity | None, lookup: Lookup, data: DataLayout) -> CheckRequest:
        """Return the request about a spec; ``lookup`` is asked for every job that the check may need."""
        text = spec.model_dump_json(by_alias=True)
        return cls(spec=text, fleet=fleet, jobs=related(spec, lookup), data=data.root)

    def problems(self, opening: _Opening = lambda _: None) -> list[Problem]:
        """Return every reason why the job could never run, up to a number of them."""
        layout = DataLayout(self.data)

        def path_of(file_id: str) -> Path | None:
            path = layout.file(file_id)
            if not path.is_file():
                return None
            opening(file_id)
            return path

        def uploaded(file_id: str) -> ModelConfig | None:
            path = path_of(file_id)
            return None if path is None else uploaded_config(path)

        context = CheckContext(
            fleet_capacity=None if self.fleet is None else self.fleet.devices,
            auto_pool="cpu" if self.fleet is None else self.fleet.auto_pool,
            lookup=self.jobs.get,
            has_file=lambda file_id: layout.file(file_id).is_file(),
            uploaded=uploaded,
            path_of=path_of,
        )
        problems = check(spec_adapter.validate_json(self.spec), context)
        return [problem.shortened() for problem in problems[:_MOST_PROBLEMS]]

    def answer(self, opening: _Opening) -> bytes:
        """Return :meth:`problems` as a JSON list."""
        return json.dumps([asdict(problem) for problem in self.problems(opening)], default=str).encode()


class PlanRequest(FrozenModel):
    """Asks how the pipeline of a training job, whose spec is given as JSON, would run."""

    asks: Literal["plan"] = "plan"
    spec: str

    def answer(self, opening: _Opening) -> bytes:
        """Return the :class:`Plan` as JSON; null where the spec has no pipeline."""
        spec = spec_adapter.validate_json(self.spec)
        return _plan_adapter.dump_json(plan(spec) if isinstance(spec, TrainSpec) else None)


AnyRequest = CheckRequest | PlanRequest
request_adapter: TypeAdapter[AnyRequest] = TypeAdapter(Annotated[AnyRequest, Field(discriminator="asks")])
