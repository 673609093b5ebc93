"""Judges bounds and verdicts of hostile graphs by their files in onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hostile_graphs import hostile
from verify_jobs import context

from benchmarks.recording_reporter import upload
from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.onnx import load
from service.bounds.onnx.reading import Runtime, parse
from service.bounds.operators.conversion import Array
from service.jobs.files import DataLayout
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
        """What bounds exclude and onnxruntime gives. Plain ones may be off by rounding, which they are not in float64:
        verdicts allow for that, or are left open.
        """
        return self._passed(torch.float32) and self._passed(torch.float64)

    def _passed(self, dtype: torch.dtype) -> str:
        """What is outside of bounds in a type, if the model itself computes about that in float32."""
        module, precise = load(self.content), load(self.content).double()
        bounded = module if dtype == torch.float32 else precise
        network = prepare(bounded, (len(self.lower),))
        box = Interval(torch.from_numpy(self.lower).to(dtype)[None], torch.from_numpy(self.upper).to(dtype)[None])
        rows = torch.cat([torch.eye(module.outputs), -torch.eye(module.outputs)])[None].to(dtype)
        x = torch.from_numpy(self.points)
        with torch.no_grad():
            rounding = (module(x).double() - precise(x.double())).abs()
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
        most = np.nanmax(np.where(np.isnan(reached), np.inf, reached))
        if most == -np.inf:
            return ""
        below = most - 1e-4 * (1 + abs(most)) if np.isfinite(most) else 1e30
        claim = {
            "coefficients": [-sign * (each == index) for each in range(self.outputs.shape[1])],
            "threshold": -below,
        }
        budget = {"seconds": 2, "restarts": 10, "replays": 0}
        row = self._row(data, {"output": [claim]}, {"method": "beta-crown", "budget": budget})
        if row is None or row["verdict"] != "verified":
            return ""
        reason = "NaN is reached" if np.isnan(reached).any() else f"{most:.9g} is above {below:.9g}"
        return f"verified, and {reason}"

    def is_noted(self, data: DataLayout) -> bool:
        """Whether a job says of its bounds that a value in the box may be no number, or refuses the file."""
        row = self._row(data, {}, {"method": "ibp"})
        return row is None or "bounds hold where every value is a number" in (row["note"] or "")

    def _row(self, data: DataLayout, asked: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any] | None:
        """A job's row; ``None`` where the file differs from onnxruntime, as it may where it has no value."""
        box = {"lower": self.lower.tolist(), "upper": self.upper.tolist(), **asked}
        model = {"onnx": upload(data, self.content)}
        spec = {"kind": "verify", "device": "cpu", "model": model, "property": {"box": box}, **fields}
        ranked, report = context(data)
        try:
            job.run(VerifySpec.model_validate(spec), ranked)
        except UnsupportedModelError:
            return None
        (row,) = report.bounds
        return dict(row)


def judged(content: bytes, lower: Array, upper: Array, points: Array) -> Judged | None:
    """A graph that can be bounded; no other may end in anything but a refusal."""
    try:
        prepare(load(content), (len(lower),))
        runtime = Runtime.of(parse(content))
    except UnsupportedModelError:
        return None
    with np.errstate(all="ignore"):
        return Judged(content, lower, upper, points, np.stack([runtime.flat(each) for each in points]))


def fault_of(seed: int, data: DataLayout, *, asks: bool) -> str | None:
    """What is wrong with the bounds of a graph, or, if it ``asks`` for one, with its verdict; ``None`` if it is
    refused. Bounds may be passed where a job says that they need not hold, since a value may be no number.
    """
    graph = judged(*hostile(seed))
    return None if graph is None else fault_in(graph, data, seed, asks=asks)


def fault_in(graph: Judged, data: DataLayout, seed: int, *, asks: bool) -> str:
    """The same of any graph; ``seed`` chooses the output and the side that it is asked about."""
    if (passed := graph.outside()) and not graph.is_noted(data):
        return passed
    return graph.falsely_verified(data, seed) if asks else ""
