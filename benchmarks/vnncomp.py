"""Run the instances of a VNN-COMP folder: verdict, seconds and the published label of each; exit 1 on a wrong verdict.

    python benchmarks/vnncomp.py FOLDER [BENCHMARK …] [--method crown] [--limit 20] [--instances 10]

``FOLDER/BENCHMARK`` holds ``labels.csv`` and the (gzipped) networks and properties that it names. Seconds are those
of the decision alone; loading and tracing a network is counted once, when it is first met.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path

import torch

from service.bounds.graph import UnsupportedModelError
from service.bounds.methods import METHODS
from service.jobs.vnnlib import parse
from service.verification.certify import Verdict
from service.verification.search import Subject, decide
from service.verification.search.inputs import FEW_INPUTS

ANSWERS = {Verdict.VERIFIED: "unsat", Verdict.FALSIFIED: "sat", Verdict.UNKNOWN: "unknown"}


def content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())


@lru_cache(maxsize=2)
def subject(path: Path, dtype: torch.dtype) -> Subject:
    started = time.monotonic()
    made = Subject.of(content(path), dtype)
    print(f"# {path.name}: loaded and traced in {time.monotonic() - started:.1f} s")
    return made


def run(folder: Path, row: dict[str, str], method: str, limit: float) -> tuple[str, float, int]:
    query = parse(content(folder / row["vnnlib"]).decode())
    dtype = torch.float64 if query.inputs <= FEW_INPUTS else torch.float32
    try:
        under = subject(folder / row["onnx"], dtype)
    except UnsupportedModelError as error:
        return f"unsupported: {error}", 0.0, 0
    decision = decide(under, query, method, min(limit, float(row["timeout_s"])))
    return ANSWERS[decision.verdict], decision.seconds, decision.domains


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("benchmarks", nargs="*")
    parser.add_argument("--method", choices=sorted(METHODS), default="crown")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for an instance")
    parser.add_argument("--instances", type=int, default=10**6, help="of each benchmark, from the first")
    given = parser.parse_args()
    names = given.benchmarks or sorted(path.parent.name for path in given.folder.glob("*/labels.csv"))
    wrong = 0
    for name in names:
        with (given.folder / name / "labels.csv").open() as file:
            rows = sorted(list(csv.DictReader(file))[: given.instances], key=lambda row: row["onnx"])
        count, spent = Counter[str](), 0.0
        for row in rows:
            verdict, seconds, domains = run(given.folder / name, row, given.method, given.limit)
            bad = {verdict, row["label"]} == {"sat", "unsat"}
            wrong += bad
            count["wrong" if bad else verdict.partition(":")[0]] += 1
            spent += seconds
            pair = f"{Path(row['onnx']).stem} {Path(row['vnnlib']).stem}"
            print(f"{name} {pair}: {verdict} {seconds:.2f} s, {domains} boxes, label {row['label']}{' WRONG' * bad}")
        print(f"== {name}: {len(rows)} instances, {dict(count)}, {spent:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
