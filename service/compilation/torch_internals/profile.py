"""Profiles a few steps: the share that ran compiled, the launches on the device, and its peak memory."""

from __future__ import annotations

import gc
import os
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from service.torch_internals.table import internal_of

_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "hipLaunchKernel")
_GRAPH_LAUNCH = "cudaGraphLaunch"
_QUIET = "6"
"""A log level above Kineto's notes on the error stream that a profile begins and ends."""


@dataclass(frozen=True)
class Profile:
    """Figures per step. ``compiled_share``: of the host's time in operators and compiled code, the part in compiled
    code; time spent waiting, such as for other ranks, is in neither.

    ``enqueue_s``: seconds until the host had queued the step. The rest is ``None`` without CUDA: ``launches`` of
    kernels and ``graph_launches`` of CUDA graphs, ``busy_s`` in which the device computed.
    """

    compiled_share: float
    enqueue_s: float
    launches: float | None = None
    graph_launches: float | None = None
    busy_s: float | None = None


def profiled(step: Callable[[], Any], steps: int, device: torch.device) -> Profile:
    """Profile ``steps`` calls of ``step``, which has been called before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)  # read at the first profile of a process
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    if cuda:
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        begun = []
        start = time.perf_counter()
        for _ in range(steps):
            begun.append(time.time_ns())
            step()
        queued = time.perf_counter() - start
        if cuda:
            torch.cuda.synchronize(device)
    events = _events(profiler)
    share = _compiled_share(events, begun)
    if not cuda:
        return Profile(share, queued / steps)
    busy = _covered(event for event in events if event.device_type() == DeviceType.CUDA) / 1e9 / steps
    if not busy:  # no data from the device: CUPTI is missing, or belongs to another profiler
        return Profile(share, queued / steps)
    names = [event.name() for event in events]
    launches = sum(name in _LAUNCHES for name in names) / steps
    return Profile(share, queued / steps, launches, names.count(_GRAPH_LAUNCH) / steps, busy)


def _events(profiler: profile) -> list[Any]:
    """Return the profiler's raw events: its processing for display takes many seconds for a large model.

    They have no public name.
    """
    inner = internal_of(profiler, "torch.profiler.profile.profiler")
    results = None if inner is None else inner.kineto_results
    return [] if results is None else list(results.events())


def _compiled_share(events: Iterable[Any], begun: Sequence[int]) -> float:
    """Return the share of the steps that ran compiled code, by the least time that one of them took for it and the
    least for all else: on a busy machine any part may be interrupted, for longer than it lasts.

    Steps have ``begun`` at times of ``time.time_ns``, as events have.
    """
    compiled, computing = [[] for _ in begun], [[] for _ in begun]  # type: tuple[list[list[Any]], list[list[Any]]]
    for event in events:
        name = event.name() if event.device_type() == DeviceType.CPU else ""
        step = max(bisect(begun, event.start_ns()) - 1, 0)
        if _is_compiled(name):
            compiled[step].append(event)
        if _is_compiled(name) or name.startswith("aten::"):
            computing[step].append(event)
    spent = [(_covered(ours), _covered(every)) for ours, every in zip(compiled, computing, strict=True) if ours]
    if not spent:
        return 0.0
    least = min(ours for ours, _ in spent)
    return least / (least + min(every - ours for ours, every in spent))


def _is_compiled(name: str) -> bool:
    return name.startswith("Torch-Compiled Region") or "CompiledFunctionBackward" in name


def _covered(events: Iterable[Any]) -> float:
    """Return the nanoseconds in which at least one of ``events`` was under way."""
    spans = sorted((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events)
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


GIB = 2**30


@dataclass(frozen=True)
class Peak:
    """Largest memory in GiB: in tensors, and taken from the device, with the private pools of CUDA graphs."""

    allocated_gib: float
    reserved_gib: float


def reset_peak(device: torch.device) -> None:
    """Count from here, without the garbage of earlier runs."""
    if device.type == "cuda":
        gc.collect()
        # Before the first tensor on a device there is no peak to reset.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> Peak | None:
    """Return the peak since ``reset_peak``; ``None`` if it is not counted."""
    if device.type != "cuda":
        return None
    return Peak(torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB)
