"""Measures how long a compile check takes through the service, phase by phase: of a small perceptron, of a language
model that a job has trained, or of the program of a file.

The first job runs on a host on which its owner has compiled nothing; the others on one that knows its compiler
and has the self-test. All rungs, training and inference; seconds from submission to the end, and of the job's
own phases until its first rung, then of rungs as they end. Two cores: ``taskset -c 0,1``.

    python benchmarks/compile_seconds.py [--checks 3] [--device cpu|cuda] [--settle 30]
    python benchmarks/compile_seconds.py --layers 8 --width 512 --device cuda      # goal: 30 s on one H200
    python benchmarks/compile_seconds.py --layers 16 --width 2048 --device cuda    # goal: 60 s on one H200
    python benchmarks/compile_seconds.py --program FILE.py --device cuda           # goal: 60 s on one H200

The file has a function ``make(config, site)``, which returns a program (``service.models.program``). After ``--limit``
seconds the job that runs is stopped, with what its rungs spent their time on so far, and nothing is left behind.

``--stages`` prints the seconds of each run, too, for each rung in the order in which they ended. Before the first rung
of a process are its preparation and the uncompiled runs, or the wait for the process that makes them.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

import torch
from launch import service

from service.jobs.records import Job
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.train import TrainSpec
from service.jobs.store import Store

MODEL = {"family": "mlp", "in_features": 32, "hidden": [64, 64], "out_features": 10}
SEQUENCE = 256
PHASES = ("train", "inference")
_PACKAGES = "MEASURED_PACKAGES"
"""A variable with the folder of the program's package, once that has been made."""
_DECLARED = """from typing import Literal

from service.jobs.plugins import ProgramConfig, ProgramKind


class Measured(ProgramConfig):
    name: Literal["measured"] = "measured"


PROGRAM = ProgramKind(Measured, "measuredprogram.measured:make")
"""


def begin_again_with(program: Path) -> NoReturn:
    """Begin this process again with a package that declares the program of a file: packages are found at the start."""
    packages = Path(tempfile.mkdtemp())
    own, about = packages / "measuredprogram", packages / "measuredprogram-1.dist-info"
    own.mkdir()
    about.mkdir()
    (own / "__init__.py").touch()
    (own / "declared.py").write_text(_DECLARED)
    shutil.copy(program, own / "measured.py")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: measuredprogram\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[trivet.programs]\nmeasured = measuredprogram.declared:PROGRAM\n")
    paths = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    own_variables = {_PACKAGES: str(packages), "PYTHONPATH": paths}
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | own_variables)


@dataclass(frozen=True)
class Limit:
    """The moment of the monotonic clock at which the benchmark ends."""

    ends: float = math.inf

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self.ends - time.monotonic())))

    @property
    def reached(self) -> bool:
        return time.monotonic() >= self.ends


@dataclass(frozen=True)
class Measurement:
    """The checks through one service."""

    store: Store
    limit: Limit
    stages: bool

    def ended(self, spec: TrainSpec | CompileSpec) -> Job:
        """Submit a spec; return its job once that has succeeded. While it runs, print what it does. Exit with what its
        rungs spent their time on if the limit is reached before.
        """
        job_id = self.store.jobs.submit(spec, "benchmark")[0].id
        began, said = time.time(), ""
        while (job := self.store.jobs.get(job_id)).ended_at is None:
            if self.limit.reached:
                print("\n".join(stage_lines(self._spans(job_id))), flush=True)
                raise SystemExit(
                    f"{spec.kind}: {job.state} after {time.time() - began:.1f} s, at --limit; {job.progress}"
                )
            time.sleep(0.02)
            doing = (job.progress and job.progress.phase) or ""
            if doing != said:
                said = doing
                print(f"  {time.time() - began:5.1f} s: {job.progress}", flush=True)
        if job.state != "succeeded":
            raise SystemExit(f"{job_id} {job.state}: {job.error}")
        return job

    def check(self, fields: dict[str, Any]) -> dict[str, float]:
        """Run one check; return its seconds by phase. Print its stages if they are wanted."""
        asked = time.time()
        job = self.ended(CompileSpec.model_validate(fields))
        assert job.ended_at is not None
        for sentence in (job.result or {}).get("summary", ()):  # a rung that is stopped is not timed
            print(f"  {sentence}", flush=True)
        rungs = self._spans(job.id)
        for line in stage_lines(rungs) if self.stages else ():
            print(line, flush=True)
        spans = {each["name"]: each["end"] - each["start"] for each in rungs}
        phases = {each.name: each.seconds for each in job.phases}
        return {"all": job.ended_at.timestamp() - asked, **phases, **spans}

    def language_model(self, device: str, layers: int, width: int, steps: int) -> dict[str, Any]:
        """Train a language model for so many steps; return the fields of a check of it."""
        model = {"family": "transformer", "dim": width, "heads": 8, "layers": layers, "max_sequence": SEQUENCE}
        common = {"data": {"source": "tokens", "sequence": SEQUENCE}, "precision": {"param": "bf16"}, "device": device}
        training = {"model": model, "steps": steps, "batch": {"global": 16}, "optimizer": {"lr": 3e-4}, **common}
        job = self.ended(TrainSpec.model_validate(training))
        return {"model": {"job": job.id}, "shapes": [8], "steps": 4, **common}

    def _spans(self, job_id: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = [
            item.event for item in self.store.events.page(job_id, after="0-0", limit=1000).items
        ]
        return [each for each in events if each["type"] == "span"]


def stage_lines(rungs: list[dict[str, Any]]) -> list[str]:
    """Return a line for each stage of each rung, from when the rung began, then the sums over all processes."""
    found, sums = [], Counter[str]()
    first = min((each["start"] for each in rungs), default=0.0)
    for each in sorted(rungs, key=itemgetter("end")):
        found.append(f"{each['name']}: from {each['start'] - first:.1f} to {each['end'] - first:.1f} s")
        runs: dict[str, float] = (each.get("detail") or {}).get("runs", {})
        found += [f"    {seconds:6.2f}  {name}" for name, seconds in runs.items()]
        sums.update({name.rpartition(": ")[2]: seconds for name, seconds in runs.items()})  # type: ignore[arg-type]
    return [*found, "all processes:", *(f"    {seconds:6.2f}  {name}" for name, seconds in sums.most_common())]


def table(checks: list[dict[str, float]]) -> str:
    names = list(dict.fromkeys(name for each in checks for name in each))
    head = f"| seconds | {' | '.join(f'check {number + 1}' for number in range(len(checks)))} |"
    rows = [f"| {name} | {' | '.join(f'{each.get(name, 0.0):.1f}' for each in checks)} |" for name in names]
    return "\n".join([head, "|---|" + "--:|" * len(checks), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before the first job")
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument("--layers", type=int, help="of a language model, instead of the perceptron")
    subject.add_argument("--program", type=Path, help="a file of a program, instead of the perceptron")
    parser.add_argument("--width", type=int, default=512, help="of the language model")
    parser.add_argument("--trained", type=int, default=120, help="steps of the language model before the first check")
    parser.add_argument("--stages", action="store_true", help="print what each rung spent its time on")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which it ends, whatever runs")
    options = parser.parse_args()
    if options.program and _PACKAGES not in os.environ:
        begin_again_with(options.program)
    limit = Limit(time.monotonic() + options.limit)
    with ExitStack() as held:
        if options.program:
            held.callback(shutil.rmtree, os.environ[_PACKAGES])
        folder = held.enter_context(tempfile.TemporaryDirectory())
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # where the host keeps an owner's compiled code
        store = held.enter_context(service(Path(folder), 1))
        limit.sleep(options.settle)
        found, measurement = [], Measurement(store, limit, options.stages)
        fields: dict[str, Any] = {"program": {"name": "measured"}} if options.program else {"model": MODEL}
        if options.layers:
            fields = measurement.language_model(options.device, options.layers, options.width, options.trained)
        for _ in range(options.checks):
            found.append(measurement.check({**fields, "device": options.device, "phases": options.phases}))
            print(f"{found[-1]['all']:.1f} s", flush=True)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"{where}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}, load {load:.1f}\n")
    print(table(found))


if __name__ == "__main__":
    main()
