"""Random ONNX graphs that put what hurts where it hurts: inputs that are left out, infinite constants, masks, epsilons
of 0, values without entries, numbers that overflow float32, and questions whether values are numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto
from onnx_models import model, node

Array = NDArray[Any]
WIDTH, POINTS = 3, 96
LEAST = float(np.finfo(np.float32).min)
ENTRYWISE = [
    "Abs",
    "Asinh",
    "Ceil",
    "Exp",
    "Exp",
    "Floor",
    "HardSigmoid",
    "Identity",
    "LeakyRelu",
    "Log",
    "Log",
    "Log",
    "Neg",
    "Reciprocal",
    "Reciprocal",
    "Relu",
    "Relu",
    "Sigmoid",
    "Sign",
    "Softplus",
    "Sqrt",
    "Sqrt",
    "Tanh",
]
PARTIAL = ["Log", "Sqrt", "Reciprocal", "Exp"]
OF_TWO = ["Add", "Sub", "Mul", "Mul", "Div", "Div", "Max", "Min"]
COMPARING = ["Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"]
REDUCING = ["ReduceMax", "ReduceMean", "ReduceLogSum", "ReduceLogSumExp", "ReduceL2", "ReduceSumSquare", "ReduceProd"]
NUMBERS: list[float] = [0.0, 1.0, -1.0, 0.5, 1e-3, 1e-30, 1e20, -1e20, 3e38, np.inf, -np.inf, LEAST]


@dataclass
class Drawing:
    """A graph that grows; ``values`` are of shape ``(1, WIDTH)``, ``truths`` too."""

    draw: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    values: list[str] = field(default_factory=lambda: ["x"])

    def one(self, names: list[str]) -> str:
        return str(self.draw.choice(names))

    def value(self) -> str:
        return self.one(self.values[-3:]) if self.draw.random() < 0.7 else self.one(self.values)

    def constant(self, *, whole: bool = True) -> str:
        name = f"c{len(self.constants)}"
        drawn = self.draw.normal(size=(1, WIDTH)).astype(np.float32)
        if self.draw.random() < 0.4:
            drawn[:, self.draw.random(WIDTH) < 0.7] = self.draw.choice(NUMBERS)
        self.constants[name] = drawn if whole else drawn[0, 0].reshape(())
        return name

    def add(self, operator: str, inputs: list[str], **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(node(operator, inputs, name, **attributes))
        return name

    def operand(self) -> str:
        return self.constant() if self.draw.random() < 0.5 else self.value()

    def grow(self) -> None:
        kinds = [self.entrywise, self.of_two, self.clipped, self.asked, self.asked, self.compared, self.normed]
        kinds += [self.reduced, self.cast, self.filled, self.product, self.without_entries, self.of_powers]
        kinds += [self.routed, self.expected]
        self.values.append(kinds[int(self.draw.integers(len(kinds)))]())

    def entrywise(self) -> str:
        return self.add(self.one(ENTRYWISE), [self.value()])

    def of_two(self) -> str:
        pair = [self.value(), self.operand()]
        return self.add(self.one(OF_TWO), pair if self.draw.random() < 0.5 else pair[::-1])

    def clipped(self) -> str:
        """With one of its ends, or both, or none."""
        given = [self.constant(whole=False) if self.draw.random() < 0.5 else "" for _ in range(2)]
        return self.add("Clip", [self.value(), *given] if given[1] else [self.value(), *filter(None, given[:1])])

    def asked(self) -> str:
        of = self.add(self.one(PARTIAL), [self.value()]) if self.draw.random() < 0.7 else self.value()
        kind = self.one(["IsNaN", "IsInf"])
        signs = {f"detect_{sign}": int(self.draw.integers(2)) for sign in ("positive", "negative")}
        if kind == "IsNaN" or self.draw.random() < 0.5 or not any(signs.values()):
            signs = {}
        truth = self.add(kind, [of], **signs)
        if self.draw.random() < 0.3:
            truth = self.add("Not", [truth])
        return self.add("Where", [truth, self.operand(), of if self.draw.random() < 0.5 else self.value()])

    def compared(self) -> str:
        truth = self.add(self.one(COMPARING), [self.value(), self.operand()])
        return self.add("Where", [truth, self.operand(), self.value()])

    def normed(self) -> str:
        name = f"s{len(self.constants)}"
        self.constants |= {name: np.ones(WIDTH, np.float32), f"{name}b": np.zeros(WIDTH, np.float32)}
        epsilon = float(self.draw.choice([0.0, 0.0, 1e-12, 1e-5]))
        return self.add("LayerNormalization", [self.value(), name, f"{name}b"], epsilon=epsilon)

    def reduced(self) -> str:
        name = self.add(self.one(REDUCING), [self.value()], axes=[1], keepdims=1)
        return self.add("Sub" if self.draw.random() < 0.5 else "Div", [self.value(), name])

    def cast(self) -> str:
        kind = int(self.draw.choice([TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT]))
        return self.add("Cast", [self.add("Cast", [self.value()], to=kind)], to=TensorProto.FLOAT)

    def filled(self) -> str:
        number = float(self.draw.choice(NUMBERS))
        value = onnx.helper.make_tensor("value", TensorProto.FLOAT, [1], [number])
        filled = self.add("ConstantOfShape", [self.add("Shape", [self.value()])], value=value)
        return self.add(self.one(OF_TWO), [self.value(), filled])

    def product(self) -> str:
        name = f"w{len(self.constants)}"
        self.constants[name] = (
            10.0 ** self.draw.choice([0, 0, 19, -25]) * self.draw.normal(size=(WIDTH, WIDTH))
        ).astype(np.float32)
        return self.add(
            "Gemm", [self.value(), name, self.constant()] if self.draw.random() < 0.5 else [self.value(), name]
        )

    def without_entries(self) -> str:
        """A value joined with one of no entries, or a part of it that has none."""
        name = f"n{len(self.constants)}"
        self.constants |= {name: np.zeros((1, 0), np.float32)}
        if self.draw.random() < 0.5:
            return self.add("Concat", [self.value(), name], axis=1)
        ends = {f"{name}{part}": np.array([number], np.int64) for part, number in (("a", 0), ("b", 0), ("c", 1))}
        self.constants |= ends
        return self.add("Concat", [self.value(), self.add("Slice", [self.value(), *ends])], axis=1)

    def of_powers(self) -> str:
        scores = self.add("Add", [self.value(), self.operand()])
        shares = self.add(self.one(["Softmax", "Softmax", "LogSoftmax"]), [scores], axis=1)
        if self.draw.random() < 0.5:
            return shares
        zero = self.constant()
        self.constants[zero] = np.zeros((1, WIDTH), np.float32)
        return self.add("Where", [self.add("IsNaN", [shares]), zero, shares])

    def routed(self) -> str:
        """Entries at the places of the largest ones: put there, taken from there, or counted there."""
        name = f"k{len(self.constants)}"
        self.constants[name] = np.array([int(self.draw.integers(1, WIDTH + 1))], np.int64)
        largest, places = f"v{len(self.nodes)}", f"i{len(self.nodes)}"
        self.nodes.append(node("TopK", [self.value(), name], [largest, places], largest=int(self.draw.integers(2))))
        if self.draw.random() < 0.7:
            return self.add("ScatterElements", [self.operand(), places, largest], axis=1)
        taken = self.add("GatherElements", [self.value(), places], axis=1)
        return self.add("Add", [self.value(), self.add("ReduceMax", [taken], axes=[1], keepdims=1)])

    def expected(self) -> str:
        """The mean of constants, or of what hurts, under a softmax."""
        shares = self.add("Softmax", [self.value()], axis=1)
        mean = self.add("ReduceSum", [self.add("Mul", [shares, self.constant()]), self.of_axis()], keepdims=1)
        return self.add("Add", [self.value(), mean])

    def of_axis(self) -> str:
        self.constants["axis"] = np.array([1], np.int64)
        return "axis"


def hostile(seed: int) -> tuple[bytes, Array, Array, Array]:
    """A model, the ends of a box, and points of it: corners, whole numbers, and others."""
    draw = np.random.default_rng(seed)
    drawing = Drawing(draw)
    for _ in range(int(draw.integers(2, 7))):
        drawing.grow()
    drawing.nodes.append(node("Identity", [drawing.values[-1]]))
    content = model(drawing.nodes, [1, WIDTH], drawing.constants)
    centre = np.round(draw.normal(size=WIDTH)) if draw.random() < 0.6 else draw.normal(size=WIDTH)
    size = 10.0 ** draw.choice([0, 0, 0, 2, 19])
    radius = draw.choice([0.0, 0.25, 1.0, 1.0, 3.0], size=WIDTH)
    lower, upper = ((size * (centre + sign * radius)).astype(np.float32) for sign in (-1, 1))
    share = draw.random((POINTS, WIDTH))
    share[: POINTS // 3] = share[: POINTS // 3].round()
    share[POINTS // 3 : POINTS // 2] = 0.5
    points = lower + share * (upper.astype(np.float64) - lower)
    points[POINTS // 2 : 2 * POINTS // 3] = points[POINTS // 2 : 2 * POINTS // 3].round()
    return content, lower, upper, points.astype(np.float32).clip(lower, upper)
