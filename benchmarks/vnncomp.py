"""Decides the instances of VNN-COMP folders and compares the verdicts with the published ones.

    python benchmarks/vnncomp.py FOLDER [BENCHMARK …] [--device cuda] [--limit 60] [--instances 10] [--jobs 4] [--csv F]

``FOLDER/BENCHMARK`` holds ``labels.csv`` and the (gzipped) networks and properties that it names. An instance has its
own time limit, or ``--limit`` if that is less. Seconds are those of the decision, without loading the network, which
stays loaded for the next instance; processor seconds are this process's. Exit 1 on a wrong verdict or an error.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from service.bounds.full_float32 import forbid_tf32
from service.bounds.graph import UnsupportedModelError
from service.bounds.methods import METHODS
from service.formats.vnnlib import parse
from service.verification.bab.driver import decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.settings import InputSearchSettings
from service.verification.verdict import Verdict

ANSWERS = {Verdict.VERIFIED: "unsat", Verdict.FALSIFIED: "sat", Verdict.UNKNOWN: "unknown"}
QUICK = 60.0


@dataclass(frozen=True)
class Instance:
    folder: Path
    onnx: str
    vnnlib: str
    limit: float
    label: str
    peer_verdict: str
    peer_seconds: str

    @property
    def name(self) -> str:
        return f"{self.folder.name} {Path(self.onnx).stem} {Path(self.vnnlib).stem}"


@dataclass(frozen=True)
class Choices:
    method: str
    device: str


FAILED = "failed"


@dataclass(frozen=True)
class Row:
    """A line of the table; ``bound`` is the proved margin."""

    benchmark: str
    onnx: str
    vnnlib: str
    label: str
    abcrown_verdict: str
    abcrown_run_s: str
    verdict: str
    seconds: float = 0.0
    processor_seconds: float = 0.0
    domains: int = 0
    bound: float = 0.0
    technique: str = ""

    @property
    def wrong(self) -> bool:
        return {self.verdict, self.label} == {"sat", "unsat"}

    @property
    def decided(self) -> bool:
        return self.verdict in ("sat", "unsat")


def content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())


@lru_cache(maxsize=2)
def subject(path: Path, dtype: torch.dtype, device: str) -> ModelUnderVerification:
    return ModelUnderVerification.of(content(path), dtype, torch.device(device))


def run(instance: Instance, choices: Choices) -> Row:
    """Few inputs are searched in float64: small boxes need the digits."""
    forbid_tf32()
    query = parse(content(instance.folder / instance.vnnlib).decode())
    dtype = torch.float64 if query.inputs <= InputSearchSettings().most_inputs else torch.float32
    try:
        under = subject(instance.folder / instance.onnx, dtype, choices.device)
    except UnsupportedModelError as error:
        return row(instance, f"unsupported: {error}")
    used, started = time.process_time(), time.monotonic()
    try:
        decision = decide(under, query, METHODS[choices.method], instance.limit)
    except Exception as error:  # one instance that fails must show, and not hide the rest
        return row(instance, f"{FAILED}: {type(error).__name__}: {error}")
    return replace(
        row(instance, ANSWERS[decision.verdict]),
        seconds=round(time.monotonic() - started, 3),
        processor_seconds=round(time.process_time() - used, 3),
        domains=decision.domains,
        bound=decision.bound,
        technique=decision.technique.value,
    )


def row(instance: Instance, verdict: str) -> Row:
    """What was published, and a verdict that took no time."""
    paths = instance.folder.name, instance.onnx, instance.vnnlib
    return Row(*paths, instance.label, instance.peer_verdict, instance.peer_seconds, verdict)


def instances(folder: Path, limit: float, first: int) -> list[Instance]:
    """Those of one network after each other, as a network stays loaded."""
    with (folder / "labels.csv").open() as file:
        lines = sorted(list(csv.DictReader(file))[:first], key=lambda line: line["onnx"])
    return [
        Instance(
            folder,
            line["onnx"],
            line["vnnlib"],
            min(limit, float(line["timeout_s"])),
            line["label"],
            line["abcrown_verdict"],
            line["abcrown_run_s"],
        )
        for line in lines
    ]


def results(every: list[Instance], choices: Choices, jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from (run(instance, choices) for instance in every)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, every, [choices] * len(every))


def summary(name: str, rows: Iterable[Row]) -> str:
    rows = list(rows)
    count = Counter(each.verdict.partition(":")[0] for each in rows)
    decided, wrong = sum(each.decided for each in rows), sum(each.wrong for each in rows)
    quick = sum(each.decided and each.seconds <= QUICK for each in rows)
    return (
        f"== {name}: {decided} of {len(rows)} decided, {wrong} wrong, {quick / max(len(rows), 1):.0%} within "
        f"{QUICK:.0f} s, {dict(count)}, {sum(each.seconds for each in rows):.0f} s, "
        f"{sum(each.processor_seconds for each in rows):.0f} processor s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("benchmarks", nargs="*")
    parser.add_argument("--method", choices=sorted(METHODS), default="crown")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for an instance")
    parser.add_argument("--instances", type=int, default=10**6, help="of each benchmark, from the first")
    parser.add_argument("--jobs", type=int, default=1, help="instances at a time, a process each")
    parser.add_argument("--csv", type=Path, help="write a row for each instance")
    given = parser.parse_args()
    choices = Choices(given.method, given.device)
    names = given.benchmarks or sorted(path.parent.name for path in given.folder.glob("*/labels.csv"))
    rows: list[Row] = []
    for name in names:
        start = len(rows)
        every = instances(given.folder / name, given.limit, given.instances)
        for each, instance in zip(results(every, choices, given.jobs), every, strict=True):
            rows.append(each)
            told = f"{each.verdict} {each.seconds:.2f} s, {each.domains} domains by {each.technique}"
            print(f"{instance.name}: {told}, label {each.label}{' WRONG' * each.wrong}", flush=True)
        print(summary(name, rows[start:]), flush=True)
    if len(names) > 1:
        print(summary("all", rows))
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(each) for each in rows)
    return 1 if any(each.wrong or each.verdict.startswith(FAILED) for each in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
