"""Measures how long CROWN takes for a trained transformer, even without running to its end, and profiles it.

    python benchmarks/verify_transformer.py [--device cuda] [--layers 8] [--width 512] [--sequences 8] [--limit 240]

Trains the transformer a little, then verifies the token after each of some sequences of 32 tokens by a verification
job. The job is ended after ``--limit`` seconds; its share done by then gives the time of the whole. Ten seconds of it
are profiled.

What 8 layers of 512, 32 tokens and 8 sequences need, by torch's ``FlopCounterMode`` over the backward pass of one
entry of each value, times the rows of that value, both sides:

| rows of one sequence | millions | 10^12 operations |
|---|--:|--:|
| both inputs of SwiGLU | 1.84 | 1,190 |
| queries, keys, values | 0.75 | 461 |
| the residual stream, for RMSNorm | 0.46 | 297 |
| scores and shares of attention, sums | 0.24 | 131 |
| all | 3.29 | 2,076 |

That is 1.66 · 10^16 for 8 sequences: 248 s at the 67 TFLOP/s of float32 on an H100 or H200, so no use of that
arithmetic over all of them takes a minute. Of a row's coefficients only those of its own and earlier tokens are not 0,
and up to the last attention only those of its own; passes go over them alone. Products of three TF32 parts each would
have a peak of 165 TFLOP/s. SwiGLU's rows, 57 % of all, are sums of 512 rows of their token's normalised input, but
bounds by the two sides of those are looser.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from recording_reporter import RecordingReporter
from torch.profiler import ProfilerActivity, profile

from service.jobs.files import DataLayout
from service.jobs.runtime import NullReporter, RunContext
from service.jobs.spec.train import TrainSpec
from service.jobs.spec.verify import VerifySpec
from service.training.job import run as train
from service.verification.job import run as verify
from service.verification.search_runner import StoppedError

TRAINED, VERIFIED = "job_00000000000000000001", "job_00000000000000000002"
DATA = {"source": "tokens", "sequence": 32}
PROFILED_S = (30.0, 40.0)
"""Seconds after the start between which the device is profiled."""


@dataclass
class Watch(RecordingReporter):
    """Prints the job's reports, profiles a stretch of it, and ends it after ``seconds``."""

    seconds: float
    device: str
    began: float = field(default_factory=time.monotonic)
    profiler: profile | None = None
    is_profiled: bool = False
    share: float = 0.0
    is_ended: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def log(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:7.1f}] {line}", flush=True)

    def progress(self, done: int, total: int, unit: str, **finer: Any) -> None:
        if self.is_ended:  # smaller batches are not tried
            raise StoppedError
        now = time.monotonic() - self.began
        share, left_s = finer.get("share"), finer.get("left_s")
        if share is not None and left_s is not None:
            print(f"[{now:7.1f}] {done}/{total} {unit}, share {share:.4f}, {left_s:.0f} s left", flush=True)
            self.share = share
        self._profile(now)
        if now > self.seconds:
            self.is_ended = True
            raise StoppedError

    def _profile(self, now: float) -> None:
        if self.is_profiled or now < PROFILED_S[0]:
            return
        if self.profiler is None:
            activity = ProfilerActivity.CUDA if self.device == "cuda" else ProfilerActivity.CPU
            self.profiler = profile(activities=[activity], with_flops=True)
            self.profiler.start()
        elif now > PROFILED_S[1]:
            self.profiler.stop()
            self.is_profiled = True
            key = "self_device_time_total" if self.device == "cuda" else "self_cpu_time_total"
            print(self.profiler.key_averages().table(sort_by=key, row_limit=14, max_name_column_width=70), flush=True)


def context(job_id: str, device: Literal["cuda", "cpu"], data: DataLayout, report: RecordingReporter) -> RunContext:
    data.job(job_id).artifacts.mkdir(parents=True, exist_ok=True)
    data.job(job_id).checkpoints.mkdir(parents=True, exist_ok=True)
    return RunContext(job_id, 1, 0, 0, 1, device, data, report, lambda: False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--method", default="crown")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which the job is ended")
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    heads = max(1, asked.width // 64)
    model = {"family": "transformer", "layers": asked.layers, "dim": asked.width, "heads": heads, "max_sequence": 32}
    training = {"kind": "train", "model": model, "data": DATA, "steps": asked.steps, "batch": {"global": 64}}
    robustness = {"data": DATA, "count": asked.sequences, "eps": 1e-3}
    verification = {"kind": "verify", "model": {"job": TRAINED}, "property": {"robustness": robustness}}
    with tempfile.TemporaryDirectory() as folder:
        data = DataLayout(Path(folder))
        spec = TrainSpec.model_validate({**training, "optimizer": {"lr": 3e-4}})
        train(spec, context(TRAINED, asked.device, data, NullReporter()))
        batched = {**verification, "method": asked.method, "budget": {"batch": asked.sequences}}
        report = Watch(asked.limit, asked.device)
        result = verify(VerifySpec.model_validate(batched), context(VERIFIED, asked.device, data, report))
        spent = time.monotonic() - report.began
        if report.is_ended:
            whole = f"about {spent / report.share:.0f} s for the whole" if report.share else "no estimate yet"
            print(f"ended after {spent:.1f} s with a share of {report.share:.4f}: {whole}")
        elif result is not None:
            print({name: result[name] for name in ("verdicts", "time", "memory_gib", "wall_seconds")})
        if asked.device == "cuda":
            print(torch.cuda.get_device_name(), f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
