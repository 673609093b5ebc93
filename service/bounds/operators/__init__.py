"""The operators that can be bounded: one line each."""

from __future__ import annotations

from collections.abc import Mapping

from service.bounds.graph import Graph, UnsupportedModelError
from service.bounds.operators.add import Addition, Negation, Subtraction
from service.bounds.operators.base import AccumulatingOperator, Collective, LinearOperator, NonlinearOperator, Operator
from service.bounds.operators.choice import UndecidedWhere, Where
from service.bounds.operators.collectives import (
    CopyToGroup,
    GatherFromGroup,
    GatherWithReduce,
    ReduceFromGroup,
    ReduceScatter,
    ScatterToGroup,
)
from service.bounds.operators.convolution import Convolution
from service.bounds.operators.elementary import (
    ArcTangent,
    ErrorFunction,
    Exponential,
    InverseHyperbolicSine,
    Logarithm,
    Sigmoid,
    Tanh,
)
from service.bounds.operators.linear import AddMatrixProduct, Linear
from service.bounds.operators.matmul import MatrixFromLeft, MatrixOfTwo, MatrixProduct, TwoDimensionalProduct
from service.bounds.operators.maximum import Maximum
from service.bounds.operators.moves import Concatenate, Expand, Pad, Permute, Reshape, Select, Slice
from service.bounds.operators.mul import Multiple, Product, Quotient
from service.bounds.operators.power import Power, Reciprocal, ReciprocalSquareRoot, SquareRoot
from service.bounds.operators.rectifiers import Elu, Gelu, HardSwish, Mish, Silu, Softplus
from service.bounds.operators.relu import Absolute, LeakyRelu, Relu
from service.bounds.operators.sin import Cosine, Sine
from service.bounds.operators.stepped import Floor, NumberTest, Stepped
from service.bounds.operators.sum import Mean, Sum


def by_overload(*operators: Operator) -> Mapping[str, Operator]:
    """Return the operators by their overloads. Raises ``TypeError`` that names one that is incomplete."""
    found: dict[str, Operator] = {}
    for operator in operators:
        if not hasattr(operator, "overloads"):
            raise TypeError(f"operator {type(operator).__name__} does not declare overloads")
        for overload in operator.overloads:
            if overload in found:
                both = f"{type(found[overload]).__name__} and {type(operator).__name__}"
                raise TypeError(f"{both} both stand for {overload}")
            found[overload] = operator
    return found


OPERATORS: Mapping[str, Operator] = by_overload(
    Linear(),
    AddMatrixProduct(),
    TwoDimensionalProduct(),
    MatrixProduct(),
    MatrixFromLeft(),
    MatrixOfTwo(),
    Convolution(),
    Addition(),
    Subtraction(),
    Negation(),
    Multiple(),
    Quotient(),
    Product(),
    Sum(),
    Mean(),
    Where(),
    Relu(),
    LeakyRelu(),
    Maximum(),
    UndecidedWhere(),
    NumberTest(),
    Absolute(),
    Floor(),
    Tanh(),
    Sigmoid(),
    ArcTangent(),
    InverseHyperbolicSine(),
    Gelu(),
    Elu(),
    Mish(),
    Silu(),
    HardSwish(),
    Softplus(),
    Exponential(),
    Logarithm(),
    ErrorFunction(),
    Sine(),
    Cosine(),
    Power(),
    SquareRoot(),
    ReciprocalSquareRoot(),
    Reciprocal(),
    Reshape(),
    Permute(),
    Expand(),
    Slice(),
    Select(),
    Concatenate(),
    Pad(),
    CopyToGroup(),
    ReduceFromGroup(),
    GatherFromGroup(),
    ScatterToGroup(),
    GatherWithReduce(),
    ReduceScatter(),
)
LINEAR: Mapping[str, LinearOperator] = {
    name: operator for name, operator in OPERATORS.items() if isinstance(operator, LinearOperator)
}
ACCUMULATING: Mapping[str, AccumulatingOperator] = {
    name: operator for name, operator in OPERATORS.items() if isinstance(operator, AccumulatingOperator)
}
COLLECTIVES: Mapping[str, Collective] = {
    name: operator for name, operator in OPERATORS.items() if isinstance(operator, Collective)
}
NONLINEAR: Mapping[str, NonlinearOperator] = {
    name: operator for name, operator in OPERATORS.items() if isinstance(operator, NonlinearOperator)
}

STEPPED: Mapping[str, Stepped] = {
    name: operator for name, operator in OPERATORS.items() if isinstance(operator, Stepped)
}


def check(graph: Graph) -> None:
    """Refuse a graph before anything is bounded; the message names every node that cannot be, and why."""
    problems = []
    for node in graph.nodes[1:]:
        operator = OPERATORS.get(node.operator)
        reason: str | None = "the operator has no rule"
        if operator is not None:
            reason = operator.refusal(node) if node.inputs else "it repeats a constant for each instance"
        if reason is not None:
            problems.append(f"{node}: {reason}")
    if problems:
        supported = ", ".join(sorted(OPERATORS))
        raise UnsupportedModelError(f"cannot bound {'; '.join(problems)}. Supported operators: {supported}")


__all__ = ["ACCUMULATING", "COLLECTIVES", "LINEAR", "NONLINEAR", "OPERATORS", "STEPPED", "check"]
