"""Measures what the digests of a checkpoint's files cost, on one rank.

    python benchmarks/digests.py FOLDER [--gib 1] [--rounds 3]

It saves and loads a state of that size in FOLDER, in turn with and without digests, and prints the least seconds of
each. With several ranks each writes and digests a file of its own, and reads its share of the files.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import torch

from service.parallel import checkpoint

PARTS = 32
WRITER = import_module("service.parallel.checkpoint.stored")


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    state = {f"{part}": torch.randn(int(given.gib * 2**28 / PARTS)) for part in range(PARTS)}
    took: dict[str, list[float]] = {"saved with": [], "saved without": [], "loaded": [], "compared": []}
    for _ in range(given.rounds):
        shutil.rmtree(given.folder, ignore_errors=True)
        with patch.object(WRITER, "digest_of", lambda path: ""):
            took["saved without"].append(seconds(lambda: checkpoint.save(given.folder, 1, state, {})))
        shutil.rmtree(given.folder)
        took["saved with"].append(seconds(lambda: checkpoint.save(given.folder, 1, state, {})))
        saved = checkpoint.require(given.folder / "step_1")
        took["compared"].append(seconds(lambda saved=saved: checkpoint.damage(saved)))  # type: ignore[misc]
        took["loaded"].append(seconds(lambda saved=saved: checkpoint.load(saved.path, state)))  # type: ignore[misc]
    shutil.rmtree(given.folder)
    for name, values in took.items():
        print(f"{name}: {min(values):.2f} s")


if __name__ == "__main__":
    main()
