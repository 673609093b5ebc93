"""Random graphs with everything that has made a value something else than a number, judged by onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_graphs import hostile
from onnx_jobs import upload
from verify_jobs import context

from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.onnx import load
from service.bounds.onnx.reading import Runtime, parse
from service.bounds.operators.onnx import Array
from service.jobs.layout import DataLayout
from service.jobs.spec.verify import VerifySpec
from service.verification import job
from service.verification.rounding_guard import FACTOR
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN


@dataclass(frozen=True, eq=False)
class Judged:
    """A graph with the outputs ``(points, outputs)`` of its own file at points of a box."""

    content: bytes
    lower: Array
    upper: Array
    points: Array
    outputs: Array

    def outside(self) -> str:
        """What bounds exclude and onnxruntime gives, if the model itself computes about that in float32."""
        module = load(self.content)
        network = prepare(module, (len(self.lower),))
        box = Interval(torch.from_numpy(self.lower)[None], torch.from_numpy(self.upper)[None])
        rows = torch.cat([torch.eye(module.outputs), -torch.eye(module.outputs)])[None]
        x = torch.from_numpy(self.points)
        with torch.no_grad():
            rounding = (module(x).double() - load(self.content).double()(x.double())).abs()
            rounding = rounding.nan_to_num(nan=torch.inf).amax(dim=0).numpy()
            for method in ("ibp", "crown"):
                low, negated = METHODS[method](network, box, BoundOptions()).lower_bounds(rows)[0].double().chunk(2)
                beyond = np.maximum(low.numpy() - self.outputs, self.outputs + negated.numpy())
                size = np.abs(np.where(np.isfinite(self.outputs), self.outputs, 0)).max()
                allowed = ABSOLUTE_MARGIN[torch.float32] + RELATIVE_MARGIN[torch.float32] * size + FACTOR * rounding
                if bool((beyond > allowed).any()):
                    return f"{method} is passed by {np.nanmax(beyond - allowed):.3g}"
        return ""

    def falsely_verified(self, data: DataLayout, seed: int) -> str:
        """What a job says is verified, without its own attack from outside, although it is not true."""
        index, sign = seed % self.outputs.shape[1], 1.0 if seed % 2 else -1.0
        reached = sign * self.outputs[:, index]
        most = np.nanmax(np.where(np.isfinite(reached), reached, -np.inf))
        below = 1e30 if np.isnan(reached).any() or not np.isfinite(most) else most - 1e-4 * (1 + abs(most))
        claim = {
            "coefficients": [-sign * (each == index) for each in range(self.outputs.shape[1])],
            "threshold": -below,
        }
        box = {"lower": self.lower.tolist(), "upper": self.upper.tolist(), "output": [claim]}
        fields: dict[str, Any] = {"method": "beta-crown", "budget": {"seconds": 2, "restarts": 10, "replays": 0}}
        spec = {
            "kind": "verify",
            "device": "cpu",
            "model": {"onnx": upload(data, self.content)},
            "property": {"box": box},
        }
        ranked, report = context(data)
        job.run(VerifySpec.model_validate(spec | fields), ranked)
        (row,) = report.bounds
        if row["verdict"] != "verified":
            return ""
        reason = "NaN is reached" if np.isnan(reached).any() else f"{most:.9g} is above {below:.9g}"
        return f"verified, and {reason}"


def judged(seed: int) -> Judged | None:
    """A graph that can be bounded; no other may end in anything but a refusal."""
    content, lower, upper, points = hostile(seed)
    try:
        prepare(load(content), (len(lower),))
        runtime = Runtime.of(parse(content))
    except UnsupportedModelError:
        return None
    with np.errstate(all="ignore"):
        return Judged(content, lower, upper, points, np.stack([runtime.flat(each) for each in points]))


def faults(seeds: range, data: DataLayout) -> dict[int, str]:
    """What is wrong with bounds of these graphs, and with verdicts about every third one."""
    found = dict[int, str]()
    for seed in seeds:
        graph = judged(seed)
        if graph is not None and (fault := graph.outside() or ("" if seed % 3 else graph.falsely_verified(data, seed))):
            found[seed] = fault
    return found


def test_no_bound_is_wrong_and_nothing_is_falsely_verified(tmp_path: Path) -> None:
    assert faults(range(6), DataLayout(tmp_path)) == {}


@pytest.mark.slow(60)
@pytest.mark.parametrize("start", range(1000, 2000, 100))
def test_nor_of_a_thousand_graphs(tmp_path: Path, start: int) -> None:
    assert faults(range(start, start + 100), DataLayout(tmp_path)) == {}
