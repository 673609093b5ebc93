"""Judges bounds and verdicts of random graphs with hostile values by their own files in onnxruntime.

    python benchmarks/hostile.py --graphs 5000 --seed 20261129 [--every 3]

The graphs are those of `tests/verification/test_hostile_graphs.py`: inputs that are left out, infinities, masks,
epsilons of 0, values without entries, numbers that overflow, and questions whether values are numbers. A job asks about
one in ``--every``. Prints each fault with its seed, and counts; exit 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests" / "helpers")]

from hostile_judge import fault_of  # noqa: E402 - found by the path above

from service.jobs.files import DataLayout  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(given.seed, given.seed + given.graphs):
            try:
                fault = fault_of(seed, DataLayout(Path(scratch)), asks=seed % given.every == 0)
            except Exception as error:  # whatever it is, it is counted, and the next graphs are judged
                fault = f"crash: {type(error).__name__}: {str(error)[:200]}"
            word = "refused" if fault is None else "wrong" if fault else "right"
            counts[word] += 1
            if fault:
                print(f"seed {seed}: {fault}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
