"""Runs the harness on programs under FSDP2 on two ranks, clean and with planted mistakes, and with a compiler
that crashes on one rank alone.

    torchrun --nproc-per-node 2 benchmarks/planted_fsdp.py

Over NCCL where there are two CUDA devices, and then up to CUDA graphs; over gloo otherwise. A line per program
and phase: whether the finding is the planted mistake, and the verdicts of its rungs. Exit 1 unless all are as expected.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from programs.sharded import Sharded, blocks, sequential

from service.compilation.judgement import Result
from service.compilation.ladder import climb
from service.compilation.ranks.group import slowest
from service.compilation.run.run_plan import plan_run
from service.compilation.rungs import LADDER, Rung
from service.compilation.selftest import backends
from service.jobs.spec.compile import Phase, Tolerance
from service.parallel import distributed
from service.parallel.distributed import read_launch

STEPS = 8


def main() -> int:
    device = distributed.start("cuda" if torch.cuda.is_available() else "cpu")
    cases: list[tuple[str, Sharded, Phase, set[str]]] = [
        ("blocks", Sharded(blocks, device), "train", {"pass"}),
        ("blocks", Sharded(blocks, device), "inference", {"pass"}),
        ("sequential", Sharded(sequential, device), "train", {"pass"}),
        # torch 2.11 raises where later versions train nothing.
        ("compiled autograd", Sharded(blocks, device, compiles_autograd=True), "train", {"frozen", "fail_error"}),
    ]
    rank = read_launch(os.environ).rank
    right = [report(*case, LADDER) for case in cases]
    # The last, as the ranks then part.
    ladder = [LADDER[0], Rung("aot_eager", backends.crashes) if rank else LADDER[1]]
    right.append(report("crash on rank 1", Sharded(blocks, device), "train", {"fail_error"}, ladder))
    if rank == 0:
        print(f"torch {torch.__version__}, {device}: {sum(right)} of {len(right)} as expected", flush=True)
    distributed.stop()
    return 0 if all(right) else 1


def report(name: str, program: Sharded, phase: Phase, expected: set[str], rungs: Sequence[Rung]) -> bool:
    began = time.perf_counter()
    results = list(climb(program, rungs, [phase], plan_run(program, STEPS, Tolerance(), slowest)))
    verdicts = [(each.case.rung.name, each.verdict) for each in results]
    right = as_expected(results, expected)
    if read_launch(os.environ).rank == 0:
        told = ", ".join(f"{rung} {verdict}" for rung, verdict in verdicts)
        print(f"{'ok   ' if right else 'WRONG'} {name:18} {phase:10} {time.perf_counter() - began:5.1f} s  {told}")
        for result in results:
            for finding in result.findings:
                print(f"        {result.case.rung.name}: {finding.verdict}: {finding.message}", flush=True)
    return right


def as_expected(results: list[Result], expected: set[str]) -> bool:
    """A clean program passes wherever it can be tried; a mistake is found, and nothing is tried after it."""
    if expected == {"pass"}:
        return all(each.verdict in {"pass", "not_applicable"} for each in results)
    found = next((each.verdict for each in results if each.verdict != "pass"), "")
    return found in expected


if __name__ == "__main__":
    raise SystemExit(main())
