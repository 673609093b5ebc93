"""Checks bounds and verdicts of random float32 graphs against onnxruntime and float64: every kind of operator,
large and small constants, inputs near breakpoints.

    python benchmarks/random_graphs.py --graphs 1000 --seed 0 [--search SECONDS] [--out FILE]

A point outside the bounds, by more than the margins of verdicts, is counted and printed with its seed. With
``--search`` a job asks for each graph whether an output stays below a value that it reaches: *verified* is then
wrong, and so is a false counterexample. Ranges of seeds may run beside each other; ``--out`` adds a line to a file
for each graph at once. Exit 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from recording_reporter import RecordingReporter, upload

from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import Network, prepare
from service.bounds.onnx import load
from service.bounds.onnx.reading import Runtime, parse
from service.jobs.files import DataLayout
from service.jobs.runtime import RunContext
from service.jobs.spec.verify import VerifySpec
from service.verification.job import run
from service.verification.rounding_guard import FACTOR
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN

WIDTH, POINTS = 4, 64
ENTRYWISE = ["Abs", "Atan", "Ceil", "Celu", "Clip", "Cos", "Elu", "Erf", "Exp", "Floor", "HardSigmoid", "HardSwish"]
ENTRYWISE += ["LeakyRelu", "Neg", "Selu", "ThresholdedRelu"]
ENTRYWISE += [
    "Relu",
    "Round",
    "Sigmoid",
    "Sign",
    "Sin",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Tanh",
    "Softmax",
    "LogSoftmax",
]
OF_TWO = ["Add", "Sub", "Mul", "Div", "Max", "Min"]
COMPARING = ["Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"]
REDUCING = ["ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceLogSumExp", "ReduceL2"]


def graph(draw: np.random.Generator) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Return a model and the ends of a box, near a whole number or near 0 half of the time."""
    nodes, constants, values = list[onnx.NodeProto](), dict[str, np.ndarray](), ["x"]

    def constant() -> str:
        size = 10.0 ** draw.integers(-12, 13) if draw.random() < 0.5 else 1.0
        name = f"c{len(constants)}"
        constants[name] = (size * draw.normal(size=(1, WIDTH))).astype(np.float32)
        return name

    for index in range(int(draw.integers(2, 7))):
        name, source = f"v{index}", str(draw.choice(values[-2:]))
        kind = str(draw.choice(["Gemm", "entry", "two", "two", "reduce", "choice"]))
        if kind == "Gemm":
            constants[f"w{index}"] = draw.normal(size=(WIDTH, WIDTH)).astype(np.float32)
            nodes.append(helper.make_node("Gemm", [source, f"w{index}", constant()], [name]))
        elif kind == "entry":
            operator = str(draw.choice(ENTRYWISE))
            ends = [str(each) for each in (constant(), constant())] if operator == "Clip" else []
            for end, sign in zip(ends, (-1, 1), strict=False):
                constants[end] = np.float32(sign * np.abs(constants[end]).max())
            nodes.append(helper.make_node(operator, [source, *ends], [name]))
        elif kind == "two":
            other = constant() if draw.random() < 0.6 else str(draw.choice(values))
            nodes.append(helper.make_node(str(draw.choice(OF_TWO)), [source, other], [name]))
        elif kind == "choice":
            other = constant() if draw.random() < 0.6 else str(draw.choice(values))
            nodes.append(helper.make_node(str(draw.choice(COMPARING)), [source, other], [f"t{index}"]))
            yes = constant() if draw.random() < 0.5 else str(draw.choice(values))
            nodes.append(helper.make_node("Where", [f"t{index}", yes, source], [name]))
        else:
            axes = {"keepdims": 1} | ({"axes": [1]} if (operator := str(draw.choice(REDUCING))) != "ReduceSum" else {})
            reduced = [helper.make_node(operator, [source], [f"r{index}"], **axes)]
            nodes += [*reduced, helper.make_node("Sub", [source, f"r{index}"], [name])]
        values.append(name)
    nodes.append(helper.make_node("Identity", [values[-1]], ["y"]))
    made = helper.make_graph(
        nodes,
        "random",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    centre = draw.normal(size=WIDTH) if draw.random() < 0.5 else np.round(draw.normal(size=WIDTH))
    radius = 10.0 ** draw.uniform(-7, 0.5, size=WIDTH)
    return model.SerializeToString(), (centre - radius).astype(np.float32), (centre + radius).astype(np.float32)


@dataclass(frozen=True)
class Drawn:
    """A graph, its box, and the results of onnxruntime and float64 at points of it."""

    data: bytes
    lower: np.ndarray
    upper: np.ndarray
    x: np.ndarray
    reached: np.ndarray
    exact: np.ndarray
    runtime: Runtime


def look(seed: int, methods: list[str], seconds: float) -> str:
    """Return the outcome of one graph, in a word or two."""
    draw = np.random.default_rng(seed)
    data, lower, upper = graph(draw)
    try:
        module = load(data)
        runtime, network = Runtime.of(parse(data)), prepare(module, (WIDTH,))
    except UnsupportedModelError:
        return "refused"
    share = draw.random((POINTS, WIDTH))
    share[: POINTS // 2] = share[: POINTS // 2].round()
    x = (lower + share * (upper.astype(np.float64) - lower)).astype(np.float32).clip(lower, upper)
    reached = np.stack([runtime.flat(each) for each in x])
    exact = load(data).double()(torch.from_numpy(x).double()).numpy()
    if not (np.isfinite(reached).all() and np.isfinite(exact).all()):
        return "not finite"
    drawn = Drawn(data, lower, upper, x, reached, exact, runtime)
    rounding = FACTOR * np.abs(module(torch.from_numpy(x)).numpy() - exact).max()
    for method in methods:
        if (outside := beyond(network, method, drawn, rounding)) is not None:
            print(f"seed {seed}: {method} is passed by {outside:.3g}", flush=True)
            return f"wrong: outside {method}"
    return f"inside, {verdict(drawn, seed, seconds)}" if seconds else "inside"


def beyond(network: Network, method: str, drawn: Drawn, rounding: float) -> float | None:
    """Return by how much bounds are exceeded, if by more than the margins of verdicts."""
    outputs = drawn.reached.shape[1]
    rows = torch.cat([torch.eye(outputs), -torch.eye(outputs)])[None]
    box = Interval(torch.from_numpy(drawn.lower)[None], torch.from_numpy(drawn.upper)[None])
    with torch.no_grad():
        low, negated = METHODS[method](network, box, BoundOptions()).lower_bounds(rows)[0].double().chunk(2)
    size = np.abs(drawn.reached).max()
    allowed = ABSOLUTE_MARGIN[torch.float32] + RELATIVE_MARGIN[torch.float32] * size + rounding
    outside = max(
        max((low.numpy() - values).max(), (values + negated.numpy()).max()) for values in (drawn.reached, drawn.exact)
    )
    return float(outside) if outside > allowed else None


def verdict(drawn: Drawn, seed: int, seconds: float) -> str:
    """Ask a job whether an output stays below its value at a point; return its verdict, or its fault."""
    output, sign = seed % drawn.reached.shape[1], 1.0 if seed % 2 else -1.0
    most = np.minimum(sign * drawn.reached[:, output], sign * drawn.exact[:, output]).max()
    below = float(np.nextafter(most, -np.inf) - abs(most) * (0.0, 1e-7, 1e-4)[seed % 3])
    coefficients = [-sign if index == output else 0.0 for index in range(drawn.reached.shape[1])]
    claim = {"coefficients": coefficients, "threshold": -below}
    box = {"lower": drawn.lower.tolist(), "upper": drawn.upper.tolist(), "output": [claim]}
    row = decided(drawn.data, box, seconds)
    if row["verdict"] == "verified":
        print(f"seed {seed}: verified, and {most:.9g} is above {below:.9g}", flush=True)
        return "wrong: verified"
    if row["verdict"] == "falsified":
        point = np.array(row["counterexample"])
        inside = bool((drawn.lower <= point).all() and (point <= drawn.upper).all())
        if not inside or sign * drawn.runtime.flat(point.astype(np.float32))[output] <= below:
            print(f"seed {seed}: falsified at {point.tolist()}, which is no counterexample", flush=True)
            return "wrong: falsified"
    return str(row["verdict"])


def decided(data: bytes, box: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the row of a job that searches."""
    with tempfile.TemporaryDirectory() as scratch:
        layout, report = DataLayout(Path(scratch)), RecordingReporter()
        spec = {"kind": "verify", "device": "cpu", "model": {"onnx": upload(layout, data)}, "property": {"box": box}}
        spec |= {"method": "beta-crown", "budget": {"seconds": seconds}}
        context = RunContext(f"job_{0:020}", 1, 0, 0, 1, "cpu", layout, report, lambda: False)
        run(VerifySpec.model_validate(spec), context)
        (row,) = report.bounds
        return dict(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["ibp", "crown"], choices=sorted(METHODS))
    parser.add_argument("--search", type=float, default=0.0, help="seconds of a search for a verdict on each graph")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.graphs):
        word = look(seed, given.methods, given.search)
        counts[word] += 1
        if given.out is not None:
            with given.out.open("a") as out:
                out.write(f"{seed} {word}\n")
    for word, count in counts.most_common():
        print(f"{word:24} {count}")
    return int(any("wrong" in word for word in counts))


if __name__ == "__main__":
    raise SystemExit(main())
