"""Verifies a network behind a bias field while other processes take most of a device's memory.

    python benchmarks/memory.py [--device cuda] [--free 65536 4096 1024 256 32] [--radii 0.0001 0.001] [--limit 30]

For every number of MiB to leave free, another process fills the device until so much is left, and the
network (eight convolutions of 32 × 32 colour images behind sixteen free inputs; ``--small`` for a network of a few kB)
is verified for each radius, by input splitting and by activation splitting. A line says how much was free at the start,
the verdict, its seconds, the domains, the most that torch had allocated, and the reason if nothing was decided. With
``--late`` the device is filled while the search runs. On a CPU, which nothing fills, the budget is limited instead.
Exit 1 if verdicts contradict each other, or anything is raised.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from biasfield import REAL, SMALL, problem

from service.bounds.full_float32 import forbid_tf32
from service.bounds.memory import SYSTEM, MemoryBudget, MemoryShortageError, keep_workspaces_small
from service.bounds.methods import CROWN, BoundOptions
from service.formats.vnnlib import Query, parse
from service.verification.bab.decision import Decision, SearchResult, Technique
from service.verification.bab.driver import SEARCHES, decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import specifications
from service.verification.verdict import Verdict

MIB = 2**20
BLOCK = 16 * MIB


def fill(left: int, device: int, line: Connection) -> None:
    """Take a device's memory until ``left`` bytes are free, say so, and hold it until told to end."""
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    held = []
    while (free := torch.cuda.mem_get_info()[0]) > left + MIB:
        size = min(max(BLOCK, (free - left) // 2), free - left)
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            break
    line.send(torch.cuda.mem_get_info()[0])
    line.recv()


@contextmanager
def filled(left: int, device: torch.device) -> Iterator[None]:
    """On a CUDA device, by a process of its own."""
    if device.type != "cuda":
        yield
        return
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=fill, args=(left, device.index or 0, there))
    process.start()
    try:
        here.recv()
        yield
    finally:
        here.send(None)
        process.join()


def decided(subject: ModelUnderVerification, query: Query, limit: float, means: Technique) -> Decision | SearchResult:
    """As a job decides, which has few inputs to split, or by activations alone."""
    if means is Technique.INPUTS:
        return decide(subject, query, CROWN, limit)
    (specification,) = specifications(query, subject.device)
    try:
        deadline = time.monotonic() + limit
        return SEARCHES[means](subject, specification, CROWN, deadline, lambda _: None).run(deadline)
    except MemoryShortageError as error:
        return SearchResult(Verdict.UNKNOWN, None, 0, -inf, error)


def later(left: int, device: torch.device, seconds: float, line: list[Iterator[None]]) -> None:
    time.sleep(seconds)
    held = filled(left, device)
    held.__enter__()
    line.append(held)


def run(
    subject: ModelUnderVerification, query: Query, left: int, means: Technique, given: argparse.Namespace
) -> Decision | SearchResult:
    device = subject.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        limit = MemoryBudget(SYSTEM.used(device) + left)
        subject = replace(subject, options=BoundOptions(memory=limit))
    if not given.late:
        with filled(left, device):
            return reported(subject, query, left, means, given.limit)
    held: list[Iterator[None]] = []
    thread = threading.Thread(target=later, args=(left, device, given.late, held))
    thread.start()
    try:
        return reported(subject, query, left, means, given.limit)
    finally:
        thread.join()
        for each in held:
            each.__exit__(None, None, None)


def reported(
    subject: ModelUnderVerification, query: Query, left: int, means: Technique, limit: float
) -> Decision | SearchResult:
    free, started = subject.memory.free(subject.device), time.monotonic()
    found = decided(subject, query, limit, means)
    seconds = time.monotonic() - started
    peak = torch.cuda.max_memory_allocated() / MIB if subject.device.type == "cuda" else 0
    why = "" if found.shortage is None else str(found.shortage)
    print(
        f"| {left // MIB} | {free / MIB:.0f} | {means.value} | {found.verdict.value} | {seconds:.1f} | {found.domains} "
        f"| {found.bound:.4g} | {peak:.0f} | {why} |",
        flush=True,
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--free", nargs="*", type=int, default=[65536, 4096, 1024, 256, 32], help="MiB, the most first")
    parser.add_argument("--radii", nargs="*", type=float, default=[1e-4, 1e-3])
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of an instance")
    parser.add_argument("--late", type=float, default=0.0, help="seconds after which the device is filled")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--float32", action="store_true", help="as jobs search; float64 else")
    given = parser.parse_args()
    keep_workspaces_small()
    forbid_tf32()
    wrong = False
    for radius in given.radii:
        made = problem(SMALL if given.small else REAL, radius)
        query, dtype = parse(made.vnnlib), torch.float32 if given.float32 else torch.float64
        subject = ModelUnderVerification.of(made.onnx, dtype, torch.device(given.device))
        print(f"\nradius {radius:g}, {subject.entries} values, {dtype}\n")
        print("| left MiB | free MiB | by | verdict | s | domains | bound | peak MiB | reason |\n" + "|---" * 9 + "|")
        for means in (Technique.INPUTS, Technique.ACTIVATIONS):
            verdicts = [run(subject, query, left * MIB, means, given).verdict for left in given.free]
            wrong |= len(set(verdicts) - {Verdict.UNKNOWN}) > 1
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
