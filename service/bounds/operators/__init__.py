"""The operators that can be bounded: one line each."""

from __future__ import annotations

from collections.abc import Mapping

from service.bounds.graph import MATRIX_FROM_LEFT, MATRIX_OF_TWO, PRODUCT, Graph, Node, UnsupportedModelError
from service.bounds.operators.abs import Absolute
from service.bounds.operators.add import Addition
from service.bounds.operators.atan import ArcTangent
from service.bounds.operators.base import LinearOperator, NonlinearOperator, Operator
from service.bounds.operators.cat import Concatenate
from service.bounds.operators.collectives import (
    CopyToGroup,
    GatherFromGroup,
    GatherWithReduce,
    ReduceFromGroup,
    ReduceScatter,
    ScatterToGroup,
)
from service.bounds.operators.convolution import Convolution
from service.bounds.operators.elu import Elu
from service.bounds.operators.erf import ErrorFunction
from service.bounds.operators.exp import Exponential
from service.bounds.operators.expand import Expand
from service.bounds.operators.floor import Floor
from service.bounds.operators.gelu import Gelu
from service.bounds.operators.linear import AddMatrixProduct, Linear
from service.bounds.operators.log import Logarithm
from service.bounds.operators.matmul import MatrixFromLeft, MatrixOfTwo, MatrixProduct
from service.bounds.operators.mish import Mish
from service.bounds.operators.mul import Multiple, Product
from service.bounds.operators.neg import Negation
from service.bounds.operators.pad import Pad
from service.bounds.operators.permute import Permute
from service.bounds.operators.power import Power
from service.bounds.operators.relu import LeakyRelu, Relu
from service.bounds.operators.reshape import Reshape
from service.bounds.operators.sigmoid import Sigmoid
from service.bounds.operators.silu import Silu
from service.bounds.operators.sin import Cosine, Sine
from service.bounds.operators.slice import Select, Slice
from service.bounds.operators.softplus import Softplus
from service.bounds.operators.sum import Sum
from service.bounds.operators.tanh import Tanh
from service.bounds.operators.where import Where

OPERATORS: Mapping[str, Operator] = {
    "aten.linear.default": Linear(),
    "aten.addmm.default": AddMatrixProduct(),
    "aten.mm.default": MatrixProduct("mat2"),
    "aten.matmul.default": MatrixProduct("other"),
    "aten.add.Tensor": Addition(1),
    "aten.sub.Tensor": Addition(-1),
    "aten.neg.default": Negation(),
    "aten.mul.Tensor": Multiple(),
    "aten.div.Tensor": Multiple(inverse=True),
    "aten.relu.default": Relu(),
    "aten.leaky_relu.default": LeakyRelu(),
    "aten.tanh.default": Tanh(),
    "aten.sigmoid.default": Sigmoid(),
    "aten.atan.default": ArcTangent(),
    "aten.gelu.default": Gelu(),
    "aten.elu.default": Elu(),
    "aten.mish.default": Mish(),
    "aten.softplus.default": Softplus(),
    "aten.exp.default": Exponential(),
    "aten.erf.default": ErrorFunction(),
    "aten.silu.default": Silu(),
    "aten.log.default": Logarithm(),
    "aten.sin.default": Sine(),
    "aten.cos.default": Cosine(),
    "aten.pow.Tensor_Scalar": Power(),
    "aten.sqrt.default": Power(0.5),
    "aten.rsqrt.default": Power(-0.5),
    "aten.reciprocal.default": Power(-1.0),
    "aten.abs.default": Absolute(),
    "aten.floor.default": Floor(),
    "aten.convolution.default": Convolution(),
    PRODUCT: Product(),
    MATRIX_OF_TWO: MatrixOfTwo(),
    MATRIX_FROM_LEFT: MatrixFromLeft(),
    "aten.sum.dim_IntList": Sum(),
    "aten.mean.dim": Sum(mean=True),
    "aten.view.default": Reshape(),
    "aten._unsafe_view.default": Reshape(),
    "aten.reshape.default": Reshape(),
    "aten.unsqueeze.default": Reshape(),
    "aten.squeeze.dim": Reshape(),
    "aten.squeeze.dims": Reshape(),
    "aten.clone.default": Reshape(),
    "aten.alias.default": Reshape(),
    "aten.detach.default": Reshape(),
    "aten._to_copy.default": Reshape(),
    "aten.permute.default": Permute(),
    "aten.expand.default": Expand(),
    "aten.slice.Tensor": Slice(),
    "aten.cat.default": Concatenate(),
    "aten.index_select.default": Select(),
    "aten.constant_pad_nd.default": Pad(),
    "aten.where.self": Where(),
    "trivet.copy_to_group.default": CopyToGroup(),
    "trivet.reduce_from_group.default": ReduceFromGroup(),
    "trivet.gather_from_group.default": GatherFromGroup(),
    "trivet.scatter_to_group.default": ScatterToGroup(),
    "trivet.gather_with_reduce_from_group.default": GatherWithReduce(),
    "trivet.reduce_scatter_to_group.default": ReduceScatter(),
}

LINEAR: Mapping[str, LinearOperator] = {
    name: operator for name, operator in OPERATORS.items() if isinstance(operator, LinearOperator)
}
NONLINEAR: Mapping[str, NonlinearOperator] = {
    name: operator for name, operator in OPERATORS.items() if isinstance(operator, NonlinearOperator)
}


def check(graph: Graph) -> None:
    """Refuse a graph before anything is bounded; the message names every node that cannot be, and why."""
    problems = []
    for node in graph.nodes[1:]:
        operator = OPERATORS.get(node.operator)
        reason = "the operator has no rule" if operator is None else _refusal(node, operator)
        if reason is not None:
            problems.append(f"{node}: {reason}")
    if problems:
        supported = ", ".join(sorted(OPERATORS))
        raise UnsupportedModelError(f"cannot bound {'; '.join(problems)}. Supported operators: {supported}")


def _refusal(node: Node, operator: Operator) -> str | None:
    return operator.refusal(node) if node.inputs else "it repeats a constant for each instance"


__all__ = ["LINEAR", "NONLINEAR", "OPERATORS", "check"]
