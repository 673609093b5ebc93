"""Walks through the sources of one commit, and prints its figures as JSON.

    python benchmarks/house_walk.py [FOLDER]

*From a box to a verdict*: one `certify` by CROWN. Types are the classes of ``service`` whose methods run, files those
whose code runs, and frames those on the stack from ``certify`` to the relaxation of a ReLU, both included.

*Walks* through a whole job of each kind, small and on one process: its reader reads each function of ``service`` where
it is called for the first time, in that order. Each change of the file begins a *stay*, and a stay in a file that was
left before is a *return*. ``own`` counts the stays in the files of the kind's own folder, and what returns to them from
elsewhere: calls of what all kinds share are passed over. FOLDER has the sources, by default the working tree.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from service.bounds.interval import Interval  # noqa: E402
from service.bounds.methods import METHODS, BoundOptions  # noqa: E402
from service.bounds.network import prepare  # noqa: E402
from service.bounds.rank_group import RankGroup  # noqa: E402
from service.compilation import job as compilation  # noqa: E402
from service.jobs.layout import DataLayout  # noqa: E402
from service.jobs.runtime import NullReporter, RunContext  # noqa: E402
from service.jobs.spec.compile import CompileSpec  # noqa: E402
from service.jobs.spec.train import TrainSpec  # noqa: E402
from service.jobs.spec.verify import VerifySpec  # noqa: E402
from service.training import job as training  # noqa: E402
from service.verification import job as verification  # noqa: E402
from service.verification.certify import certify  # noqa: E402
from service.verification.counterexamples import CounterexampleChecker  # noqa: E402
from service.verification.engine import NetworkEngine  # noqa: E402
from service.verification.properties.base import InstanceBatch  # noqa: E402

MLP: dict[str, Any] = {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10}
TRAINED, JOB = "job_" + "1" * 20, "job_" + "2" * 20


@contextmanager
def profiled(note: Callable[[FrameType], None]) -> Iterator[None]:
    """Let ``note`` see each call of a function of ``service``."""

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/service/" in frame.f_code.co_filename:
            note(frame)

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


def distance(frame: FrameType | None) -> int:
    """Return how many frames of ``service`` there are from this one back to ``certify``."""
    frames = 0
    while frame is not None:
        frames += "/service/" in frame.f_code.co_filename
        if frame.f_code.co_name == "certify":
            return frames
        frame = frame.f_back
    return 0


def to_a_verdict() -> dict[str, int]:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.zeros(1, 4)
    batch = InstanceBatch([0], Interval(x - 0.1, x + 0.1), torch.eye(2)[None], torch.zeros(1, 2), x.double(), [[]])
    engine, checker = NetworkEngine(prepare(module, (4,))), CounterexampleChecker(module, RankGroup())
    types, files, frames = set[str](), set[str](), 0

    def note(frame: FrameType) -> None:
        nonlocal frames
        files.add(frame.f_code.co_filename)
        own = frame.f_locals.get("self")
        if own is not None and type(own).__module__.startswith("service."):
            types.add(type(own).__qualname__)
        if frame.f_code.co_name == "relax" and frame.f_code.co_filename.endswith("relu.py"):
            frames = max(frames, distance(frame))

    with profiled(note):
        certify(engine, checker, METHODS["crown"], BoundOptions(), batch)
    return {"types": len(types), "files": len(files), "frames": frames}


def stays(files: Iterable[str]) -> dict[str, int]:
    """Count the stays of a walk that comes through these files in this order."""
    visits = [file for file, _ in groupby(files)]
    return {"stays": len(visits), "returns": len(visits) - len(set(visits)), "files": len(set(visits))}


def walk(kind: Any, spec: Any, data: DataLayout, job: str) -> dict[str, Any]:
    """Run a job of this kind, which ``kind.run`` is, and count what a reader comes through."""
    read: dict[CodeType, None] = {}
    context = RunContext(job, 1, 0, 0, 1, "cpu", data, NullReporter(), lambda: False)
    for folder in (context.paths.artifacts, context.paths.attempt(1)):
        folder.mkdir(parents=True)
    with profiled(lambda frame: read.setdefault(frame.f_code)):
        kind.run(spec, context)
    files = [code.co_filename for code in read if not code.co_name.startswith("<")]
    room = str(Path(kind.__file__).parent)
    return {**stays(files), "own": stays(file for file in files if file.startswith(room))}


def walks() -> Mapping[str, dict[str, Any]]:
    compilation.self_test = lambda: ()  # type: ignore[attr-defined] # what it runs is what the job runs
    with tempfile.TemporaryDirectory() as folder:
        data = DataLayout(Path(folder))
        digits = {"source": "digits"}
        train = {"model": MLP, "data": digits, "batch": {"global": 24}, "steps": 3, "checkpoint": {"every": 2}}
        verify = {"model": {"job": TRAINED}, "property": {"robustness": {"data": digits, "count": 2, "eps": 0.01}}}
        compiled = {"model": MLP, "data": digits, "modes": ["eager", "aot_eager"], "shapes": [8]}
        return {
            "train": walk(training, TrainSpec.model_validate(train), data, TRAINED),
            "verify": walk(verification, VerifySpec.model_validate(verify), data, JOB),
            "compile": walk(compilation, CompileSpec.model_validate(compiled), data, "job_" + "3" * 20),
        }


def main() -> None:
    print(json.dumps({"certify": to_a_verdict(), **walks()}))


if __name__ == "__main__":
    main()
