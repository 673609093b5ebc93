"""Measures bounds of the networks of a parity folder by every method: width, seconds, peak memory, and the peer's.

    python benchmarks/verify.py FOLDER [--device cuda] [--networks a b] [--batches 1 256] [--methods crown alpha-crown]

Bounds are of all ten outputs, both sides, on the boxes ``|x − x0| ≤ eps`` of the folder, with 20 iterations for
methods that iterate. Seconds are the median of warm repeats. If a checkout of auto_LiRPA is on the path, it
runs each case too, in the same process; its peak is measured apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from parity_networks import plain
from torch import Tensor, nn

from service.bounds.full_float32 import forbid_tf32
from service.bounds.interval import Interval
from service.bounds.memory import keep_freed_memory, keep_workspaces_small
from service.bounds.methods import METHODS, BoundOptions, repeatedly
from service.bounds.network import prepare
from service.bounds.onnx import load

PEER_METHODS = {"ibp": "IBP", "crown-ibp": "CROWN-IBP", "crown": "CROWN", "alpha-crown": "CROWN-Optimized"}
Bound = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Figures:
    network: str
    batch: int
    method: str
    width: float
    lower: float
    seconds: float
    peak_mb: float


def module_of(folder: Path, name: str) -> nn.Module:
    """From ONNX if the folder has it."""
    path = folder / f"model_{name}.onnx"
    return load(path.read_bytes()) if path.exists() else plain(folder, name)


def boxes_of(folder: Path, name: str, batch: int, device: torch.device) -> Interval | None:
    """``None`` if the folder has fewer inputs."""
    stored = np.load(folder / f"inputs_{name}.npz")
    x = torch.tensor(stored["u8"][:batch]).flatten(1).float().to(device) / 255
    x = (x - 0.5) * 2 if name.startswith("e") else x
    eps = float(stored["eps"])
    while len(x) < batch and len(x) >= 128:  # one network has half the inputs: they count twice
        x = torch.cat([x, x])[:batch]
    return Interval(x - eps, x + eps) if len(x) == batch else None


def ours(module: nn.Module, box: Interval, method: str) -> Bound:
    network = prepare(module, tuple(box.lower.shape[1:]))
    bounding = repeatedly(METHODS[method].plain, box.lower.device)
    identity = torch.eye(network.graph.output.size, device=box.lower.device)
    rows = torch.cat([identity, -identity])[None]

    @torch.no_grad()
    def bound() -> tuple[Tensor, Tensor]:
        found = bounding(network, box, BoundOptions()).lower_bounds(rows)
        lower, negated = found.chunk(2, dim=1)
        return lower, -negated

    return bound


def peers(module: nn.Module, box: Interval, method: str) -> Bound:
    from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm  # type: ignore[import-not-found]

    norm = PerturbationLpNorm(x_L=box.lower, x_U=box.upper)
    bounded = BoundedModule(module, box.centre, device=str(box.lower.device))

    def bound() -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = bounded.compute_bounds(
            x=(BoundedTensor(box.centre, norm),), method=PEER_METHODS[method]
        )
        return found

    return bound


def measured(case: tuple[str, int, str], bound: Bound, repeats: int, device: torch.device) -> Figures:
    """The peak is that of all runs: a record that is replayed takes memory without asking for it again."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    warm = WARM if repeats else 0
    while len(seconds) < warm + max(1, repeats) and sum(seconds[warm:]) <= LONGEST:
        started = time.perf_counter()
        lower, upper = bound()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        if len(seconds) == 1 and seconds[0] > LONG:
            warm = min(warm, 1)
    peak = torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else 0.0
    width, low = (upper - lower).double().mean().item(), lower.double().mean().item()
    return Figures(*case, width, low, statistics.median(seconds[warm:]), peak)


LONG, LONGEST = 5.0, 60.0
"""Seconds: of an analysis that is not recorded, and of all that are timed."""
WARM = 2
"""The first analysis finds out how many rows there are, the second records them."""


def show(who: str, figures: Figures) -> None:
    print(
        f"| {who} | {figures.network} | {figures.batch} | {figures.method} | {figures.width:.5g} | {figures.lower:.5g} "
        f"| {figures.seconds:.4g} | {figures.peak_mb:.0f} |",
        flush=True,
    )


def run(folder: Path, case: tuple[str, int, str], repeats: int, device: torch.device) -> list[tuple[str, Figures]]:
    name, batch, method = case
    box = boxes_of(folder, name, batch, device)
    if box is None:
        return []
    module = module_of(folder, name).to(device)
    found = [("Trivet", measured(case, ours(module, box, method), repeats, device))]
    try:
        found.append(
            ("auto_LiRPA", measured(case, peers(plain(folder, name).to(device), box, method), repeats, device))
        )
    except ImportError:
        pass
    except Exception as error:  # the peer's: out of memory, an operator that its version does not know
        print(f"| auto_LiRPA | {name} | {batch} | {method} | {type(error).__name__} | | | |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="*", default=["a", "b", "c", "d", "e_plain"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 256])
    parser.add_argument("--methods", nargs="*", default=["ibp", "crown", "alpha-crown"])
    parser.add_argument("--repeats", type=int, default=5, help="0: one cold run")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    keep_workspaces_small()
    keep_freed_memory()
    forbid_tf32()
    print("| | network | batch | method | mean width | mean lower | seconds | peak MB |")
    print("|---" * 8 + "|")
    rows = []
    for name in given.networks:
        for batch in given.batches:
            for method in given.methods:
                for who, figures in run(given.folder, (name, batch, method), given.repeats, torch.device(given.device)):
                    show(who, figures)
                    rows.append({"who": who, **asdict(figures)})
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
