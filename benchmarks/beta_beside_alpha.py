"""Shows that beta-crown proves what alpha-crown proves: both on the same networks and samples, with the same seconds.

    python benchmarks/beta_beside_alpha.py [--networks cnn deep mlp tall] [--seconds 10 2] [--times 1 2] [--count 50]

Networks are trained on the digits for a moment, from a seed. With ``--times``, beta-crown then has so many times the
seconds of the longest row that alpha-crown proves and crown does not, and is compared with what alpha-crown proves in
the first ``--seconds``. Exit 1 if alpha-crown proves a sample that beta-crown leaves open. Run it with one thread on a
quiet machine: seconds decide.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.recording_reporter import RecordingReporter
from service.jobs.files import DataLayout
from service.jobs.runtime import RunContext
from service.jobs.spec.model import ConvnetConfig, MlpConfig
from service.jobs.spec.verify import RobustnessProperty, VerifySpec
from service.models import build
from service.models.data import load
from service.verification import job

IMAGE: dict[str, Any] = {"height": 8, "width": 8, "out_features": 10}
NETWORKS: dict[str, ConvnetConfig | MlpConfig] = {
    "cnn": ConvnetConfig(channels=(12, 6), hidden=(64,), **IMAGE),
    "deep": ConvnetConfig(channels=(6, 6, 6, 6), hidden=(64,), **IMAGE),
    "mlp": MlpConfig(in_features=64, hidden=(256,) * 6, out_features=10),
    "tall": MlpConfig(in_features=64, hidden=(384,) * 7, out_features=10),
}
DIGITS = {"source": "digits"}
NEAR = 0.1
"""How far the training moves samples against the network, which leaves questions that are hard and have an answer."""
Device = Literal["cpu", "cuda"]
METHODS = "crown", "alpha-crown", "beta-crown"


@dataclass(frozen=True)
class Case:
    """``name`` of a network whose samples have ``seconds`` each."""

    name: str
    seconds: float
    count: int
    eps: float


def train(data: DataLayout, name: str, steps: int = 200) -> str:
    """Train a network, and leave what a training job leaves; return the job's id."""
    torch.manual_seed(1)
    config = NETWORKS[name]
    asked = RobustnessProperty.model_validate({"robustness": {"data": DIGITS, "eps": 1}})
    model, samples = build(config, seed=1), load(asked.robustness.data).train
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        batch = samples.take(torch.randint(len(samples), (256,)))
        x = batch.inputs.clone().requires_grad_()
        for _ in range(3):
            (slope,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), batch.targets), x)
            moved = x.detach() + NEAR / 2 * slope.sign()
            x = moved.clamp(batch.inputs - NEAR, batch.inputs + NEAR).clamp(0, 1).requires_grad_()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), batch.targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    trained = f"job_{sorted(NETWORKS).index(name):020}"
    folder = data.job(trained).artifacts
    folder.mkdir(parents=True)
    save_file({key: tensor.detach() for key, tensor in model.named_parameters()}, folder / "model.safetensors")
    about = {"config": config.model_dump(mode="json"), "step": steps, "parallel": {}}
    (folder / "model.json").write_text(json.dumps(about))
    return trained


def verify(data: DataLayout, trained: str, case: Case, method: str, device: Device) -> list[dict[str, Any]]:
    """Return the rows of a job."""
    asked = {"data": DIGITS, "count": case.count, "eps": case.eps, "clip": "data"}
    given = {"model": {"job": trained}, "property": {"robustness": asked}, "method": method, "device": device}
    spec = VerifySpec.model_validate({**given, "budget": {"seconds": case.seconds}})
    report = RecordingReporter()
    own = f"job_{time.time_ns():020}"
    job.run(spec, RunContext(own, 1, 0, 0, 1, device, data, report, lambda: False))
    return sorted(report.bounds, key=lambda row: int(row["instance"]))


def prove(data: DataLayout, trained: str, case: Case, method: str, device: Device) -> dict[int, float]:
    """Print a line for a method; return the samples that it proves, each with its seconds."""
    started = time.monotonic()
    rows = verify(data, trained, case, method, device)
    spent = time.monotonic() - started
    proved = {row["instance"]: row["seconds"] for row in rows if row["verdict"] == "verified"}
    false = sum(row["verdict"] == "falsified" for row in rows)
    most = max(row["seconds"] for row in rows)
    cells = case.name, case.eps, round(case.seconds, 3), method, len(proved), false, case.count
    print(f"| {' | '.join(map(str, cells))} | {spent:.1f} | {most:.2f} |", flush=True)
    return proved


def compare(data: DataLayout, trained: str, case: Case, times: list[float], device: Device) -> int:
    """Print a line for each method, and for beta-crown one more for each number of times the seconds that alpha-crown
    needs; return how many samples alpha-crown alone proves, in all.
    """
    proved = {method: prove(data, trained, case, method, device) for method in METHODS}
    alone = [seconds for row, seconds in proved["alpha-crown"].items() if row not in proved["crown"]]
    found = {case.seconds: proved["beta-crown"]}
    for each in times if alone else []:
        seconds = each * max(alone)
        found[seconds] = prove(data, trained, replace(case, seconds=seconds), "beta-crown", device)
    behind = {seconds: sorted(set(proved["alpha-crown"]) - set(rows)) for seconds, rows in found.items()}
    for seconds, rows in behind.items():
        if rows:
            print(f"BEHIND: {case.name}, {seconds:g} s: samples {rows}", flush=True)
    return sum(map(len, behind.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--seconds", nargs="*", type=float, default=[10.0])
    parser.add_argument("--times", nargs="*", type=float, default=[])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--eps", nargs="*", type=float, default=[0.05])
    parser.add_argument("--device", default="cpu", choices=get_args(Device))
    given = parser.parse_args()
    print("| network | eps | seconds | method | proved | falsified | samples | wall s | longest row s |")
    print("|---" * 9 + "|")
    behind = 0
    with tempfile.TemporaryDirectory() as folder:
        data = DataLayout(Path(folder))
        for name in given.networks:
            trained = train(data, name)
            for eps in given.eps:
                for number, seconds in enumerate(given.seconds):
                    case = Case(name, seconds, given.count, eps)
                    behind += compare(data, trained, case, [] if number else given.times, given.device)
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
