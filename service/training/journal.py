"""Reports a training: the metrics of each step, by their public names, and the sentences of the job's log."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from service.jobs.runtime import RunContext
from service.jobs.spec.compile import Phase
from service.jobs.spec.data import FileArrays, FileTokens
from service.jobs.spec.train import TrainSpec
from service.models.data import Samples
from service.training.setup import Training
from service.training.step_totals import StepTotals

_NAMES_SHOWN = 100
_UNITS = ("bytes", "kB", "MB", "GB", "TB")
PEAK_FLOPS: Mapping[str, float] = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""Dense bf16 FLOP/s from NVIDIA's data sheets, by the whole name of a CUDA device: that of another part or of a slice
of a device only begins alike.
"""


class Journal:
    """Logs what is trained, each evaluation, and the end of the training.

    Only the first rank writes a journal; the calls of the others do nothing.
    """

    def __init__(self, spec: TrainSpec, context: RunContext) -> None:
        self._spec, self._context = spec, context
        self._began = time.monotonic()

    def begin(self, step: int, lines: Iterable[str], samples: str = "") -> None:
        """Log ``lines``, and the step at which training begins; ``samples`` says what each step takes."""
        for line in lines:
            self._say(line)
        first = "" if step == 0 else f", from step {step:,} on"
        self._say(f"training: {self._spec.steps:,} steps{samples}{first}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation."""
        found = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._say(f"evaluation at step {step:,}: {found}")

    def ended(self, step: int, loss: float, early: str | None) -> None:
        """Log how the training ended; ``early`` is why it did before its last step, if it was not asked to."""
        total, seconds = self._spec.steps, time.monotonic() - self._began
        how = early or ("finished" if step == total else "asked to stop")
        last = "" if math.isnan(loss) else f"loss {loss:.4g}, "
        self._say(f"{how} after step {step:,} of {total:,}: {last}{seconds:.1f} s of training")

    def _say(self, line: str) -> None:
        if self._context.rank == 0:
            self._context.report.log(line)


def described(training: Training) -> list[str]:
    """Return lines about the data, the model, its updates and the layout of a training."""
    return [
        f"data: {_data(training)}",
        f"model: {_model(training)}",
        *_updates(training),
        f"layout: {layout(training.spec, training.device)}{_pipeline(training.spec)}",
    ]


def _data(training: Training) -> str:
    dataset, data = training.dataset, training.spec.data
    where = f" {data.file}" if isinstance(data, FileTokens | FileArrays) else ""
    parts = f"{_samples(dataset.train)} to train on, {len(dataset.test):,} to test"
    source = "" if data is None else data.source
    return f"{source}{where}, {parts} (SHA-256 {dataset.sha256[:12]}…)"


def _model(training: Training) -> str:
    precision = training.spec.precision
    computed = "float8" if precision.float8 else precision.param
    family = training.outline.config.family
    return (
        f"{family}, {training.outline.elements:,} parameters, computed in {computed}{compiled(training.compile_modes)}"
    )


def _updates(training: Training) -> list[str]:
    """Return which rule updates which parameters, where that is not one rule for all; of a pipeline, those of the
    first rank.
    """
    names = training.updater.names()
    if len(names) == 1:
        return []
    where = " of the first rank" if training.spec.parallel.pp > 1 else ""
    return [f"{'frozen' if rule == 'frozen' else f'by {rule}'}{where}: {_several(own)}" for rule, own in names.items()]


def compiled(modes: Mapping[Phase, str]) -> str:
    """Return how the phases are compiled, to be added to a line."""
    return "".join(f", {phase} compiled by {mode}" for phase, mode in modes.items())


def layout(spec: TrainSpec, device: torch.device) -> str:
    """Return the ranks of a job, and what they run on."""
    kind = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return f"{spec.parallel.arithmetic} rank{'s' * (spec.parallel.world_size > 1)} on {kind}"


def _pipeline(spec: TrainSpec) -> str:
    if spec.parallel.pp == 1:
        return ""
    return f"; pipeline by {spec.pipeline.schedule}, {spec.stages} stages, {spec.micro_batches} micro-batches"


def readable_bytes(size: int) -> str:
    """Return a size with the largest decimal unit of which it has, rounded, at least one, such as ``1.4 MB``."""
    power = next((power for power in range(len(_UNITS)) if round(size / 1000**power) < 1000), len(_UNITS) - 1)
    value = size / 1000**power
    return f"{size} {_UNITS[0]}" if power == 0 else f"{value:.{int(round(value, 1) < 10)}f} {_UNITS[power]}"


def _several(names: Sequence[str]) -> str:
    """Return a count of parameters with the first names."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{len(names)} parameters: {shown}{', …' if len(names) > _NAMES_SHOWN else ''}"


def _samples(samples: Samples) -> str:
    each = "" if samples.sequence is None else f" of {samples.sequence:,} tokens"
    return f"{len(samples):,} samples{each}"


@dataclass(frozen=True)
class Timing:
    """Says how long a step took on this rank, in seconds, and how long of that it waited for its batch."""

    seconds: float
    data_wait: float


def step_metrics(training: Training, totals: StepTotals, rate: float, timing: Timing) -> dict[str, float]:
    """Return the metrics of a step by name: times and throughput of it alone, ``tflops`` and, where the device's
    peak is known, ``mfu`` per device.

    ``data_wait_fraction`` is the share of the step in which the first rank waited for its batch; ``bubble_fraction``
    the share of a pipeline's run in which devices computed nothing (on CUDA that of the step before).
    """
    seconds = timing.seconds
    samples, tokens = training.spec.batch.global_, training.dataset.train.sequence
    flop = training.outline.config.flop_per_sample(training.outline.elements, tokens or 1) * samples
    flops = flop / seconds / training.spec.parallel.world_size
    metrics = {
        "loss": totals.loss,
        "grad_norm": totals.grad_norm,
        "lr": rate,
        "step_ms": seconds * 1e3,
        "data_wait_fraction": timing.data_wait / seconds,
        "tokens_per_s" if tokens else "samples_per_s": samples * (tokens or 1) / seconds,
        "tflops": flops / 1e12,
        "memory_gib": totals.memory_gib,
    }
    if totals.bubble_fraction is not None:
        metrics["bubble_fraction"] = totals.bubble_fraction
    if training.device.type == "cuda":
        peak = PEAK_FLOPS.get(torch.cuda.get_device_name(training.device))
        metrics |= {"mfu": flops / peak} if peak else {}
    return metrics
