"""Defines the requests to a limited process: read a text, check jobs, plan a pipeline."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import Field, TypeAdapter

from service.formats.llama import uploaded_config
from service.jobs.checks.dependencies import Lookup, files_of, related
from service.jobs.files import DataLayout, steps_of_checkpoints, steps_of_weights
from service.jobs.kinds.registry import spec_adapter
from service.jobs.plugins import CheckContext, CommonSpec, ModelConfig
from service.jobs.records import FleetCapacity, FrozenModel, Job, Problem
from service.jobs.spec.train import TrainSpec
from service.jobs.submission.check import check
from service.jobs.submission.plan import Plan, plan
from service.jobs.text import documents
from service.jobs.text.documents import Position, positions

_MOST_PROBLEMS = 100
"""Most problems in one answer; a document with more is refused for the first ones."""
_LONGEST_DOCUMENT = 1_000_000
"""The most characters of a document's JSON, and of the paths of its fields; the answer is one line."""
LeftSteps = tuple[tuple[int, ...], tuple[int, ...]]
"""The steps at which a job has left weights, and those of its checkpoints."""
_Opening = Callable[[str], None]
"""Called with the id of each uploaded file before it is read."""
_plan_adapter: TypeAdapter[Plan | None] = TypeAdapter(Plan | None)


def joined(*paths: str) -> str:
    """Return the dotted path of a field below another path."""
    return ".".join(filter(None, paths))


class CheckLimits(FrozenModel):
    """Limits of one request: bytes of memory and seconds of processor time."""

    memory_bytes: int
    processor_s: int


class CheckRequest(FrozenModel):
    """Asks whether jobs could run. It has their specs as JSON, each under its path in the body (empty if it is
    the body), and the other facts of the check: the fleet, the jobs that the specs name, and the folder of
    uploaded files.
    """

    asks: Literal["check"] = "check"
    specs: dict[str, str]
    fleet: FleetCapacity | None
    jobs: dict[str, Job]
    data: Path
    uploads: frozenset[str]
    """Ids of the files that the specs name and their projects have."""
    without_scripts: tuple[str, ...] = ()
    """The submission's projects that may not run scripts of their own."""
    left: dict[str, LeftSteps] | None = None
    """Steps that training jobs have left, if hosts share no folder, so that a check cannot look."""

    @classmethod
    def of(
        cls,
        specs: Mapping[str, CommonSpec],
        fleet: FleetCapacity | None,
        visible: Lookup,
        lookup: Lookup,
        data: DataLayout,
        *,
        uploads: Collection[str],
        without_scripts: Iterable[str] = (),
        left: Callable[[str], LeftSteps] | None = None,
    ) -> CheckRequest:
        """Return the request about specs by path; ``visible`` finds jobs that they name, ``lookup`` those
        behind their models, each once.
        """
        texts = {path: spec.model_dump_json(by_alias=True) for path, spec in specs.items()}
        jobs = related(specs.values(), visible, lookup)
        steps = None if left is None else {job.id: left(job.id) for job in jobs.values() if job.kind == "train"}
        return cls(
            specs=texts,
            fleet=fleet,
            jobs=jobs,
            data=data.root,
            uploads=frozenset(uploads),
            without_scripts=tuple(without_scripts),
            left=steps,
        )

    def problems(self, opening: _Opening = lambda _: None) -> list[Problem]:
        """Return the reasons why one of the jobs could never run, up to a limit."""
        context = self._context(opening)
        problems = (
            replace(problem, path=joined(path, problem.path))
            for path, text in self.specs.items()
            for problem in self._find_problems(spec_adapter.validate_json(text), context)
        )
        return [problem.shortened() for problem in itertools.islice(problems, _MOST_PROBLEMS)]

    def _context(self, opening: _Opening) -> CheckContext:
        """Return what the checks ask; ``opening`` is told of each uploaded file before it is read."""
        layout = DataLayout(self.data)

        def path_of(file_id: str) -> Path | None:
            path = layout.file(file_id)
            if file_id not in self.uploads or not path.is_file():
                return None
            opening(file_id)
            return path

        def uploaded(file_id: str) -> ModelConfig | None:
            path = path_of(file_id)
            return None if path is None else uploaded_config(path)

        return CheckContext(
            fleet_capacity=None if self.fleet is None else self.fleet.devices,
            fleet_packages=None if self.fleet is None else self.fleet.packages,
            auto_pool="cpu" if self.fleet is None else self.fleet.auto_pool,
            lookup=self.jobs.get,
            has_file=lambda file_id: file_id in self.uploads and layout.file(file_id).is_file(),
            uploaded=uploaded,
            path_of=path_of,
            without_scripts=self.without_scripts,
            weights_of=lambda job_id: self._left(layout, job_id)[0],
            checkpoints_of=lambda job_id: self._left(layout, job_id)[1],
        )

    def _find_problems(self, spec: CommonSpec, context: CheckContext) -> Iterator[Problem]:
        yield from check(spec, context)
        if self.left is not None and spec.max_hosts > 1:
            message = "hosts share no folder here (TRIVET_STORE), in which the ranks of a gang meet"
            yield Problem("max_hosts", message, spec.max_hosts, "1")

    def _left(self, layout: DataLayout, job_id: str) -> LeftSteps:
        """Return the steps of a job's weights and of its checkpoints."""
        if job_id not in self.jobs:
            return (), ()
        if self.left is not None:
            return self.left.get(job_id, ((), ()))
        return steps_of_weights(layout.job(job_id)), steps_of_checkpoints(layout.job(job_id))

    @property
    def opens_files(self) -> bool:
        """Return whether the check reads uploaded files."""
        return bool(self.uploads)

    def answer(self, opening: _Opening) -> bytes:
        """Return :meth:`problems` as a JSON list."""
        return json.dumps([asdict(problem) for problem in self.problems(opening)], default=str).encode()

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield each uploaded file that the specs name, as the path of its field and its id."""
        for path, text in self.specs.items():
            for field, file_id in files_of(spec_adapter.validate_json(text)):
                yield joined(path, field), file_id


class PlanRequest(FrozenModel):
    """Asks how the pipeline of a training job, whose spec is given as JSON, would run."""

    asks: Literal["plan"] = "plan"
    spec: str
    opens_files: ClassVar[bool] = False

    def answer(self, opening: _Opening) -> bytes:
        """Return the :class:`Plan` as JSON; null where the spec has no pipeline."""
        spec = spec_adapter.validate_json(self.spec)
        return _plan_adapter.dump_json(plan(spec) if isinstance(spec, TrainSpec) else None)

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield each uploaded file that the spec names, as the path of its field and its id."""
        return files_of(spec_adapter.validate_json(self.spec))


class ReadDocument(FrozenModel):
    """The document of a YAML or JSON text, as JSON, with the places of its fields; or why there is none."""

    content: str | None = None
    positions: dict[str, Position] = Field(default_factory=dict)
    problem: str | None = None
    line: int | None = None
    column: int | None = None


class ReadRequest(FrozenModel):
    """Asks for the document of a YAML or JSON text. A few lines whose aliases expand to gigabytes are refused."""

    asks: Literal["read"] = "read"
    text: str
    opens_files: ClassVar[bool] = False

    def answer(self, opening: _Opening) -> bytes:
        """Return the :class:`ReadDocument` as JSON."""
        return self.read().model_dump_json().encode()

    def read(self) -> ReadDocument:
        """Return the document of a text, or why it has none."""
        try:
            content = _content(self.text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            return _unread(error)
        found = positions(self.text)
        return ReadDocument(content=content, positions=found if sum(map(len, found)) <= _LONGEST_DOCUMENT else {})

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield nothing: no file is read."""
        return iter(())


def _content(text: str) -> str:
    """Return the value of a JSON text. Raises ``yaml.YAMLError``, ``ValueError`` and ``RecursionError``."""
    value = documents.parse(text)
    documents.check_json(value, "")
    content = json.dumps(value, ensure_ascii=False)
    content.encode()
    if len(content) > _LONGEST_DOCUMENT:
        raise ValueError(f"it stands for more than {_LONGEST_DOCUMENT} characters of JSON")
    return content


def _unread(error: Exception) -> ReadDocument:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    place = {} if mark is None else {"line": mark.line + 1, "column": mark.column + 1}
    if isinstance(error, yaml.MarkedYAMLError):
        problem = documents.short_reason(error)
    elif isinstance(error, documents.ExpansionError):
        problem = f"it {error}"
    elif isinstance(error, RecursionError):
        problem = "it is nested too deeply"
    elif isinstance(error, UnicodeEncodeError):
        problem = "it holds half of a character, a lone surrogate"
    else:
        problem = str(error)
    return ReadDocument(problem=problem, **place)


AnyRequest = CheckRequest | PlanRequest | ReadRequest
request_adapter: TypeAdapter[AnyRequest] = TypeAdapter(Annotated[AnyRequest, Field(discriminator="asks")])
