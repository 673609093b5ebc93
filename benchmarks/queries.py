"""Measures the cost of a query as a job of its own, beside its search: one after the other, and many submitted at once.

Each job verifies one VNN-LIB query about a ReLU network of the size of an ACAS Xu one (5 inputs, 6 layers of 50, 5
outputs: 13 thousand weights) that is drawn from a seed. The phases are those of the job's record; *search* is
the row's seconds of its instance, and *beyond* the rest of the job: for those submitted together the devices'
seconds of the whole, less all searches, by job.

    python benchmarks/queries.py [--series 8] [--queries 60] [--device cpu|cuda] [--slots 2] [--settle 30]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from launch import service
from onnx import TensorProto, helper, numpy_helper

from service.jobs.records import Job
from service.jobs.spec.verify import VerifySpec
from service.jobs.store import Store

WIDTHS = (5, 50, 50, 50, 50, 50, 50, 5)
HALF_WIDTH = 0.2
SAMPLES = 20_000
ABOVE = 0.3
"""How far beyond the samples' largest value the query asks for the output, as a share of their range."""
PHASES = ("starting", "importing", "loading", "preparing", "first row", "working", "ending")
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Net:
    """Weights ``(outputs, inputs)`` and biases of layers with ReLU between."""

    layers: list[tuple[Array, Array]]

    @classmethod
    def drawn(cls, seed: int) -> Net:
        draw = np.random.default_rng(seed)
        shapes = [(wide, before) for before, wide in itertools.pairwise(WIDTHS)]
        return cls([(draw.normal(size=shape) * (2 / shape[1]) ** 0.5, draw.normal(size=shape[0])) for shape in shapes])

    def __call__(self, x: Array) -> Array:
        for index, (weight, bias) in enumerate(self.layers):
            x = (x if index == 0 else np.maximum(x, 0)) @ weight.T + bias
        return x

    def onnx(self) -> bytes:
        nodes, constants, name = [], [], "x"
        for index, (weight, bias) in enumerate(self.layers):
            made = f"y{index}"
            constants += [
                numpy_helper.from_array(array.astype(np.float32), f"{what}{index}")
                for what, array in (("w", weight), ("b", bias))
            ]
            nodes.append(helper.make_node("Gemm", [name, f"w{index}", f"b{index}"], [made], transB=1))
            if index < len(self.layers) - 1:
                nodes.append(helper.make_node("Relu", [made], [f"{made}r"]))
                made += "r"
            name = made
        ends = [helper.make_tensor_value_info(at, TensorProto.FLOAT, [1, size]) for at, size in (("x", 5), (name, 5))]
        graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return bytes(model.SerializeToString())

    def query(self, seed: int) -> str:
        """Return the query whether an output exceeds, in a box, a value that samples do not quite reach."""
        draw = np.random.default_rng(seed)
        center = draw.uniform(-1, 1, size=5)
        reached = self(center + draw.uniform(-HALF_WIDTH, HALF_WIDTH, size=(SAMPLES, 5)))[:, 0]
        least = reached.max() + ABOVE * np.ptp(reached)
        names = [f"X_{index}" for index in range(5)] + [f"Y_{index}" for index in range(5)]
        lines = [f"(declare-const {name} Real)" for name in names]
        for index, at in enumerate(center):
            lines += [
                f"(assert (>= X_{index} {at - HALF_WIDTH:.9f}))",
                f"(assert (<= X_{index} {at + HALF_WIDTH:.9f}))",
            ]
        return "\n".join([*lines, f"(assert (>= Y_0 {least:.9f}))"])


@dataclass(frozen=True)
class Cost:
    """Seconds of one job: from submission to its end, of its phases, of bounds and search."""

    wall: float
    phases: Mapping[str, float]
    search: float

    @property
    def cells(self) -> list[float]:
        return [self.wall, *(self.phases.get(name, 0.0) for name in PHASES), self.search, self.wall - self.search]


def specs(store: Store, count: int, device: str) -> list[VerifySpec]:
    net = Net.drawn(0)
    model = store.files.add([net.onnx()], "application/octet-stream").id
    queries = [store.files.add([net.query(seed).encode()], "text/plain").id for seed in range(count)]
    return [
        VerifySpec.model_validate(
            {"model": {"onnx": model}, "property": {"vnnlib": query}, "method": "beta-crown", "device": device}
            | {"budget": {"seconds": 60}}
        )
        for query in queries
    ]


def run(store: Store, asked: Sequence[VerifySpec]) -> list[Cost]:
    """Submit them together, and wait for their ends."""
    submitted = {}
    for spec in asked:
        began = time.time()
        submitted[store.jobs.submit(spec, "benchmark")[0].id] = began
    left = set(submitted)
    while left:
        time.sleep(0.01 if len(left) == 1 else 0.5)
        left = {each for each in left if store.jobs.get(each).ended_at is None}
    return [_cost(store, store.jobs.get(job_id), began) for job_id, began in submitted.items()]


def _cost(store: Store, job: Job, began: float) -> Cost:
    rows = [item.event for item in store.events.page(job.id, types={"bound"}, limit=10).items]
    if job.ended_at is None or len(rows) != 1 or rows[0]["verdict"] not in {"verified", "falsified"}:
        raise SystemExit(f"{job.id} {job.state}: {job.error}, {rows}")
    phases = {phase.name: phase.seconds or 0.0 for phase in job.phases}
    return Cost(job.ended_at.timestamp() - began, phases, float(rows[0]["seconds"]))


def row(name: str, costs: Sequence[Cost]) -> str:
    columns = zip(*(cost.cells for cost in costs), strict=True)
    return f"| {name} | " + " | ".join(f"{statistics.median(column):.2f}" for column in columns) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=8, help="jobs one after the other")
    parser.add_argument("--queries", type=int, default=60, help="jobs submitted together")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--slots", type=int, default=2, help="CPU ranks at a time")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before the first job")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder, service(Path(folder), options.slots) as store:
        time.sleep(options.settle)
        asked = specs(store, max(options.series, options.queries), options.device)
        series = []
        for spec in asked[: options.series]:
            series += run(store, [spec])
            print(series[-1], file=sys.stderr, flush=True)
        began = time.time()
        together = run(store, asked[: options.queries]) if options.queries else []
        spent = time.time() - began
    devices = options.slots if options.device == "cpu" else 1
    digest = hashlib.sha256(Net.drawn(0).onnx()).hexdigest()[:8]
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, commit")
    print(f"{commit.stdout.strip()}, network {digest}, on {options.device}. Seconds: medians.\n")
    print(f"| jobs | wall | {' | '.join(PHASES)} | search | beyond |\n|---|{'--:|' * (len(PHASES) + 3)}")
    print(row("the first", series[:1]))
    print(row(f"{options.series - 1} more, one after the other", series[1:]))
    if together:
        beyond = (devices * spent - sum(cost.search for cost in together)) / len(together)
        print(f"\n{len(together)} submitted together took {spent:.1f} s on {devices} devices, of which their searches")
        print(f"took {sum(cost.search for cost in together):.1f} device seconds: {beyond:.2f} s beyond, by job.")


if __name__ == "__main__":
    main()
