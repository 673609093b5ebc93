"""Measures the compile ladder on real models: which rungs are safe, and the costs and gains of compiling.

Runs compile jobs as a rank does, without a service: every rung of the ladder, in both phases, judged against eager and
float64, with cold and warm compile times, step times as ratios to eager in one run, launches and peak memory. With the
checkout on ``PYTHONPATH`` (in bf16 FSDP is what casts parameters, so one rank is a group too):

    torchrun --nproc-per-node 1 benchmarks/compile.py [--cases mlp,training,…] [--phases train,inference]
    torchrun --nproc-per-node 2 benchmarks/compile.py --cases mlp,transformer --parallel dp_shard=2
    torchrun --nproc-per-node 1 benchmarks/compile.py --smoke          # tiny, on the CPU: does every case run?
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from train_rows import MODEL, SMOKE_MODEL

from service.compilation.job import run
from service.jobs.files import DataLayout
from service.jobs.runtime import NullReporter, RunContext
from service.jobs.spec.compile import CompileSpec
from service.parallel import distributed

SMALL = MODEL | {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn_dim": 2048, "max_sequence": 512}
BF16 = {"precision": {"param": "bf16"}, "tolerance": {"absolute": 1e-3, "ratio": 3}}
CASES: Mapping[str, dict[str, Any]] = {
    "mlp": {"model": {"family": "mlp", "in_features": 784, "hidden": [256] * 6, "out_features": 10}, "shapes": [256]},
    "transformer": {"model": SMALL, "shapes": [8]},
    "transformer-bf16": {"model": SMALL, "shapes": [8], **BF16},
    "accumulation": {"model": SMALL, "shapes": [2], "micro_batches": 4, "phases": ["train"]},
    "training": {"model": MODEL | {"max_sequence": 1024, "layers": 8}, "shapes": [4], **BF16},
}
"""``training`` has half the layers of the model in ``train.py``: they are alike, and the others tell no more."""
SMOKE: dict[str, Any] = {"shapes": [2], "steps": 2}
COLUMNS = ("case", "phase", "rung", "verdict", "step ms", "eager ms", "ratio", "cold s", "warm s", "launches", "graphs")
MEMORY = ("GiB", "eager GiB", "reserved GiB")


class Progress(NullReporter):
    """Prints the result of every rung as it comes."""

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks

    def span(self, name: str, start: float, end: float, detail: Mapping[str, Any] | None = None) -> None:
        if self.speaks:
            print(f"  {name}: {(detail or {}).get('verdict')} after {end - start:.1f} s", flush=True)

    def log(self, line: str) -> None:
        if self.speaks:
            print(f"    {line}", flush=True)


def spec_of(case: str, options: argparse.Namespace) -> CompileSpec:
    fields = {"phases": options.phases.split(","), "steps": options.steps, **CASES[case]}
    fields["parallel"] = dict(_pair(each) for each in options.parallel.split(",") if each)
    if options.modes:
        fields["modes"] = options.modes.split(",")
    if options.smoke:
        model = SMOKE_MODEL | {"max_sequence": 16} if "dim" in fields["model"] else fields["model"]
        fields |= {**SMOKE, "model": model}
    return CompileSpec.model_validate(fields)


def _pair(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    return name, int(size)


def check(case: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The report of one case's job; empty on other ranks than the first."""
    launch = distributed.read_launch(os.environ)
    device: Any = "cpu" if options.smoke or not torch.cuda.is_available() else "cuda"
    reporter = Progress(speaks=launch.rank == 0)
    context = RunContext(
        f"job_{case}", 1, launch.rank, launch.local_rank, launch.world_size, device, DataLayout(folder), reporter, bool
    )
    if run(spec_of(case, options), context) is None:
        return {}
    found: dict[str, Any] = json.loads((context.paths.artifacts / "report.json").read_text())
    return found


def rows(case: str, report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A table row for each rung; a dash stands for values that were not measured."""
    for rung in report["rungs"]:
        times, profile = rung["compile_s"] or {}, rung["profile"] or {}
        yield (
            case,
            rung["phase"],
            rung["rung"],
            rung["verdict"].replace("_", " "),
            _number(rung["step_ms"], 3),
            _number(rung["eager_step_ms"], 3),
            _number(rung["ratio"], 3),
            _number(times.get("cold"), 1),
            _number(times.get("warm"), 1),
            _number(profile.get("launches"), 0),
            _number(profile.get("graph_launches"), 0),
            *(_number(rung[name], 2) for name in ("memory_gib", "eager_memory_gib", "reserved_gib")),
        )


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def table(all_rows: list[tuple[str, ...]]) -> str:
    columns = (*COLUMNS, *MEMORY)
    rule = ["---"] * 4 + ["--:"] * (len(columns) - 4)
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, rule, *all_rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--phases", default="train,inference")
    parser.add_argument("--modes", default="", help="rungs, from eager up; all when absent")
    parser.add_argument("--parallel", default="", help="as dp_shard=2,tp=2")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, help="folder for the reports")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    found: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases.split(","):
            began = time.perf_counter()
            report = check(case, options, Path(folder))
            if report:
                found += rows(case, report)
                told = "\n".join(report["summary"])
                print(f"{case}: {time.perf_counter() - began:.0f} s\n{told}", flush=True)
                if options.out:
                    options.out.mkdir(parents=True, exist_ok=True)
                    (options.out / f"{case}.json").write_text(json.dumps(report, indent=1))
    if found:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        print(f"\n{name}, torch {torch.__version__}, {options.parallel or 'one device'}\n\n{table(found)}", flush=True)
    distributed.stop()


if __name__ == "__main__":
    main()
