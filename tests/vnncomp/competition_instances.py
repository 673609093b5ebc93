"""A small network and queries about it, in the layout of the competition's benchmarks."""

from __future__ import annotations

import gzip
from pathlib import Path

from onnx_models import dense

NETWORK = dense([5, 8, 3], batch=1)
DECLARED = "".join(f"(declare-const {name} Real)" for name in ("X_0", "X_1", "X_2", "X_3", "X_4", "Y_0", "Y_1", "Y_2"))
BOX = "".join(f"(assert (>= X_{index} -0.3))(assert (<= X_{index} 0.1))" for index in range(5))
SATISFIED, NEVER = (f"{DECLARED}{BOX}(assert (>= Y_0 {threshold}))" for threshold in (-100, 100))
VERSION_2 = (
    "(vnnlib-version <2.0>)\n(declare-network f (declare-input X real [1, 5]) (declare-output Y real [1, 3]))\n"
    + "".join(f"(assert (>= X[0,{index}] -0.3))(assert (<= X[0,{index}] 0.1))" for index in range(5))
    + "(assert (>= Y[0,0] -100))"
)
"""As ``SATISFIED``."""


def benchmark(folder: Path, rows: dict[str, tuple[str, float]]) -> Path:
    """Write a benchmark with a query and its seconds for each name, the files gzipped."""
    for part in ("onnx", "vnnlib"):
        (folder / part).mkdir(parents=True)
    (folder / "onnx" / "net.onnx.gz").write_bytes(gzip.compress(NETWORK))
    for name, (text, _) in rows.items():
        (folder / "vnnlib" / f"{name}.vnnlib.gz").write_bytes(gzip.compress(text.encode()))
    lines = [f"onnx/net.onnx,vnnlib/{name}.vnnlib,{seconds}\n" for name, (_, seconds) in rows.items()]
    (folder / "instances.csv").write_text("".join(lines))
    return folder
