"""Profiles a few steps: the operators that ran uncompiled, the launches on the device, and its peak memory."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
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
    """The figures of one step. What the device did is ``None`` without CUDA."""

    operators: float
    """Calls of PyTorch's operators, those within others too."""
    uncompiled: float
    """The calls of these outside of compiled code, which calls some itself."""
    enqueue_s: float
    """Seconds until the host had queued the step."""
    launches: float | None = None
    """Launches of kernels."""
    graph_launches: float | None = None
    """Launches of CUDA graphs."""
    busy_s: float | None = None
    """Seconds in which the device computed."""


def record_profile(step: Callable[[], Any], steps: int, device: torch.device) -> Callable[[], Profile]:
    """Profile ``steps`` calls of ``step``, which has been called before.

    Return what reads the figures per step; reading takes longer than the steps do.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)  # read at the first profile of a process
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    if cuda:
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        queued = time.perf_counter() - start
        if cuda:
            torch.cuda.synchronize(device)
    return partial(_read_profile, profiler, steps, queued / steps)


def _read_profile(profiler: profile, steps: int, enqueue_s: float) -> Profile:
    events = _events(profiler)
    operators, uncompiled = (count / steps for count in _count_operators(events))
    found = Profile(operators, uncompiled, enqueue_s)
    spans = _spans(event for event in events if event.device_type() == DeviceType.CUDA)
    if not spans:  # no device, or no data from it: CUPTI is missing, or belongs to another profiler
        return found
    busy = sum(end - start for start, end in spans) / 1e9 / steps
    names = [event.name() for event in events]
    launches = sum(name in _LAUNCHES for name in names) / steps
    return replace(found, launches=launches, graph_launches=names.count(_GRAPH_LAUNCH) / steps, busy_s=busy)


def start_profiler(device: torch.device) -> None:
    """Make the first profile of this process, which loads the device's profiler: later ones are quick."""
    with contextlib.suppress(RuntimeError):  # another profiler may hold the device
        record_profile(lambda: None, 1, device)


def _events(profiler: profile) -> list[Any]:
    """Return the profiler's raw events: its processing for display takes many seconds for a large model.

    They have no public name.
    """
    inner = internal_of(profiler, "torch.profiler.profile.profiler")
    results = None if inner is None else inner.kineto_results
    return [] if results is None else list(results.events())


def _count_operators(events: Iterable[Any]) -> tuple[int, int]:
    """Return the number of PyTorch's operators that ran, and of those that ran outside of compiled code.

    Both depend on the program alone. Shares of time do not: on a busy machine any part may be interrupted, for longer
    than it lasts.
    """
    compiled: dict[int, list[Any]] = {}
    operators: list[Any] = []
    for event in events:
        if event.device_type() == DeviceType.CPU and _is_compiled(event.name()):
            compiled.setdefault(event.start_thread_id(), []).append(event)
        elif event.device_type() == DeviceType.CPU and event.name().startswith("aten::"):
            operators.append(event)
    spans = {thread: _spans(each) for thread, each in compiled.items()}
    inside = sum(_is_within(event.start_ns(), spans.get(event.start_thread_id(), [])) for event in operators)
    return len(operators), len(operators) - inside


def _is_compiled(name: str) -> bool:
    return name.startswith("Torch-Compiled Region") or "CompiledFunctionBackward" in name


def _is_within(moment: int, spans: Sequence[tuple[int, int]]) -> bool:
    index = bisect(spans, moment, key=itemgetter(0)) - 1
    return index >= 0 and moment <= spans[index][1]


def _spans(events: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the nanoseconds in which at least one of ``events`` was under way, from and to, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


GIB = 2**30


@dataclass(frozen=True)
class Peak:
    """Largest memory in GiB: in tensors, and taken from the device, with the private pools of CUDA graphs."""

    allocated_gib: float
    reserved_gib: float


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of live tensors on a device, without the garbage of earlier runs; 0 if they are not counted."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Count from here, without the garbage of earlier runs."""
    if device.type == "cuda":
        gc.collect()
        # Before the first tensor on a device there is no peak to reset.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device, besides: int) -> Peak | None:
    """Return the peak since ``reset_peak`` less ``besides`` bytes of the check's own; ``None`` if not counted."""
    if device.type != "cuda":
        return None
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return Peak((allocated - besides) / GIB, (reserved - besides) / GIB)


def free_bytes(place: torch.device) -> int:
    """Return the free bytes of a device's memory, with those that this process only keeps for its next tensors."""
    if place.type == "cuda":
        cached = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return torch.cuda.mem_get_info(place)[0] + cached
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
