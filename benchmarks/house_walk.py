"""How far is it from a box to a verdict? Runs one `certify` by CROWN, and prints what it comes through, as JSON.

    python benchmarks/house_walk.py [FOLDER]

Types are the classes of ``service`` whose methods run, files those whose code runs, and frames those on the stack from
``certify`` to the relaxation of a ReLU, both included. FOLDER has the sources, by default the working tree.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from service.bounds.interval import Interval  # noqa: E402
from service.bounds.methods import METHODS, BoundOptions  # noqa: E402
from service.bounds.network import prepare  # noqa: E402
from service.bounds.rank_group import RankGroup  # noqa: E402
from service.verification.certify import certify  # noqa: E402
from service.verification.counterexamples import CounterexampleChecker  # noqa: E402
from service.verification.engine import NetworkEngine  # noqa: E402
from service.verification.properties.base import InstanceBatch  # noqa: E402


def distance(frame: FrameType | None) -> int:
    """Return how many frames of ``service`` there are from this one back to ``certify``."""
    frames = 0
    while frame is not None:
        frames += "/service/" in frame.f_code.co_filename
        if frame.f_code.co_name == "certify":
            return frames
        frame = frame.f_back
    return 0


def main() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.zeros(1, 4)
    batch = InstanceBatch([0], Interval(x - 0.1, x + 0.1), torch.eye(2)[None], torch.zeros(1, 2), x.double(), [[]])
    engine, checker = NetworkEngine(prepare(module, (4,))), CounterexampleChecker(module, RankGroup())
    types, files, frames = set[str](), set[str](), 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal frames
        if event != "call" or "/service/" not in frame.f_code.co_filename:
            return
        files.add(frame.f_code.co_filename)
        own = frame.f_locals.get("self")
        if own is not None and type(own).__module__.startswith("service."):
            types.add(type(own).__qualname__)
        if frame.f_code.co_name == "relax" and frame.f_code.co_filename.endswith("relu.py"):
            frames = max(frames, distance(frame))

    sys.setprofile(note)
    try:
        certify(engine, checker, METHODS["crown"], BoundOptions(), batch)
    finally:
        sys.setprofile(None)
    print(json.dumps({"types": len(types), "files": len(files), "frames": frames}))


if __name__ == "__main__":
    main()
