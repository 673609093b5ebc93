"""Measures what the counters of a training cost: the job's own steps on the CPU, watched and unwatched in turn.

    python benchmarks/counters.py [--rounds 15]

A round takes as many steps as the default of ``counters.every`` has between two watched ones: with no counters, with
every step watched, and with the default. Printed are, for each model, medians over the rounds: milliseconds of a step
without counters, what watching one step adds, that cost as a share of the time at the default, and the share that was
measured at the default, which includes the noise of the machine. ``outliving`` lets the objective keep its newest
results, so that each watched step is searched for holders.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.recording_reporter import RecordingReporter
from service.jobs.files import DataLayout
from service.jobs.runtime import RunContext
from service.jobs.spec.train import CountersSpec, TrainSpec
from service.objectives import Objective
from service.training.loop import Loop
from service.training.setup import prepare

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {
        "model": {"family": "mlp", "in_features": 64, "hidden": [32, 32], "out_features": 10},
        "data": {"source": "digits"},
        "batch": {"global": 24},
    },
    "transformer": {
        "model": {"family": "transformer", "dim": 64, "layers": 2, "heads": 4, "max_sequence": 32},
        "data": {"source": "tokens", "sequence": 32},
        "batch": {"global": 8, "micro": 4},
    },
}
EVERY = CountersSpec().every


def loop_of(name: str, every: int | None, folder: str) -> Loop:
    spec = {**MODELS[name], "steps": 10**6, "counters": {"every": every}}
    context = RunContext(
        job_id="job_benchmark",
        attempt=1,
        rank=0,
        local_rank=0,
        world_size=1,
        device_type="cpu",
        data=DataLayout(Path(folder)),
        report=RecordingReporter(),
        should_stop=lambda: False,
    )
    return Loop(prepare(TrainSpec.model_validate(spec), context, torch.device("cpu")))


def seconds(loop: Loop, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        loop.advance()
    return (time.perf_counter() - began) / steps


def keep_newest(objective: Objective) -> None:
    """Let the objective hold the results of its last calls."""
    mean, kept = objective.mean, deque[torch.Tensor](maxlen=16)

    def keeping(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        kept.append(outputs.detach())
        return mean(outputs, targets)

    object.__setattr__(objective, "mean", keeping)


def measure(name: str, rounds_asked: int, *, outliving: bool) -> None:
    assert EVERY is not None
    with tempfile.TemporaryDirectory() as folder:
        loops = {every: loop_of(name, every, folder) for every in (None, 1, EVERY)}
        for loop in loops.values():
            if outliving:
                keep_newest(loop.training.objective)
            seconds(loop, 5)
        rounds = [{every: seconds(loop, EVERY) for every, loop in loops.items()} for _ in range(rounds_asked)]
    plain = statistics.median(each[None] for each in rounds)
    added = statistics.median(each[1] - each[None] for each in rounds)
    measured = statistics.median(each[EVERY] / each[None] for each in rounds) - 1
    row = f"{name}{', outliving' * outliving:<12} {plain * 1e3:8.2f} ms a step; a watched one {added * 1e3:+7.3f} ms"
    print(f"{row}; every {EVERY}: {added / EVERY / plain:7.3%} reckoned, {measured:+6.2%} measured", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name in MODELS:
        measure(name, rounds, outliving=False)
    measure("mlp", rounds, outliving=True)


if __name__ == "__main__":
    main()
