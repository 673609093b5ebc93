"""Profiles a step on one rank: kernels by time, and communication that no computation hides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 3
TOP = 40
Interval = tuple[float, float]


def profiled(step: Callable[[], object], device: torch.device, path: Path, *, rank: int) -> None:
    """Run a few steps under the profiler on rank 0 (the others just run them) and write its table to ``path``."""
    if rank != 0:
        for _ in range(STEPS):
            step()
        return
    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=activities) as prof:
        for _ in range(STEPS):
            step()
        if on_device:
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if on_device else DeviceType.CPU
    events = [event for event in prof.events() if event.device_type == kind and not event.is_user_annotation]
    path.write_text(table(events))


def table(events: Iterable[Any]) -> str:
    """Microseconds of the profiler as milliseconds per step."""
    spans = [(event.name, (event.time_range.start, event.time_range.end)) for event in events]
    computing = union(span for name, span in spans if not is_communication(name))
    talking = union(span for name, span in spans if is_communication(name))
    busy = union([*computing, *talking])
    whole = max(end for _, end in busy) - min(start for start, _ in busy)
    per_step = 1e3 * STEPS
    exposed = length(busy) - length(computing)
    lines = [
        f"per step, ms: {whole / per_step:.2f} from first to last kernel, "
        f"{length(computing) / per_step:.2f} computing, "
        f"{length(talking) / per_step:.2f} communicating, {exposed / per_step:.2f} of it "
        f"exposed, {(whole - length(busy)) / per_step:.2f} idle"
    ]
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, (start, end) in spans:
        totals[name][0] += end - start
        totals[name][1] += 1
    for name, (time, calls) in sorted(totals.items(), key=lambda item: -item[1][0])[:TOP]:
        lines.append(f"{time / per_step:9.3f} ms {calls / STEPS:7.1f} ×  {name[:150]}")
    return "\n".join(lines) + "\n"


def is_communication(name: str) -> bool:
    return "nccl" in name.lower() or "gloo" in name.lower()


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Overlapping intervals joined, in order."""
    joined: list[Interval] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(spans: Iterable[Interval]) -> float:
    return sum(end - start for start, end in spans)
