"""The operators that can be bounded: one line each."""

from __future__ import annotations

from collections.abc import Mapping

from service.bounds.graph import MATRIX_FROM_LEFT, MATRIX_OF_TWO, PRODUCT, Graph, Node, UnsupportedModelError
from service.bounds.rules.affine import AddMatrixProduct, LinearLayer, MatrixFromLeft, MatrixProduct
from service.bounds.rules.arithmetic import Multiple, Negation, Sum
from service.bounds.rules.base import Rule
from service.bounds.rules.bilinear import MatrixOfTwo, Product
from service.bounds.rules.collectives import (
    CopyToGroup,
    GatherFromGroup,
    GatherWithReduce,
    ReduceFromGroup,
    ReduceScatter,
    ScatterToGroup,
)
from service.bounds.rules.convolution import Convolution
from service.bounds.rules.elu import Elu
from service.bounds.rules.erf import ERROR_FUNCTION
from service.bounds.rules.exponential import EXPONENTIAL
from service.bounds.rules.gelu import Gelu
from service.bounds.rules.mish import MISH
from service.bounds.rules.periodic import COSINE, SINE
from service.bounds.rules.piecewise import Absolute, Floor, LeakyRelu, Relu
from service.bounds.rules.power import LOGARITHM, Power
from service.bounds.rules.shape import Choose, Concatenate, Expand, Pad, Permute, SameOrder, Select, Slice, Total
from service.bounds.rules.sigmoid import SIGMOID
from service.bounds.rules.silu import SILU
from service.bounds.rules.softplus import Softplus
from service.bounds.rules.tanh import ARC_TANGENT, TANH

RULES: Mapping[str, Rule] = {
    "aten.linear.default": LinearLayer(),
    "aten.addmm.default": AddMatrixProduct(),
    "aten.mm.default": MatrixProduct("mat2"),
    "aten.matmul.default": MatrixProduct("other"),
    "aten.add.Tensor": Sum(1),
    "aten.sub.Tensor": Sum(-1),
    "aten.neg.default": Negation(),
    "aten.mul.Tensor": Multiple(),
    "aten.div.Tensor": Multiple(inverse=True),
    "aten.relu.default": Relu(),
    "aten.leaky_relu.default": LeakyRelu(),
    "aten.tanh.default": TANH,
    "aten.sigmoid.default": SIGMOID,
    "aten.atan.default": ARC_TANGENT,
    "aten.gelu.default": Gelu(),
    "aten.elu.default": Elu(),
    "aten.mish.default": MISH,
    "aten.softplus.default": Softplus(),
    "aten.exp.default": EXPONENTIAL,
    "aten.erf.default": ERROR_FUNCTION,
    "aten.silu.default": SILU,
    "aten.log.default": LOGARITHM,
    "aten.sin.default": SINE,
    "aten.cos.default": COSINE,
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
    "aten.sum.dim_IntList": Total(),
    "aten.mean.dim": Total(mean=True),
    "aten.view.default": SameOrder(),
    "aten._unsafe_view.default": SameOrder(),
    "aten.reshape.default": SameOrder(),
    "aten.unsqueeze.default": SameOrder(),
    "aten.squeeze.dim": SameOrder(),
    "aten.squeeze.dims": SameOrder(),
    "aten.clone.default": SameOrder(),
    "aten.alias.default": SameOrder(),
    "aten.detach.default": SameOrder(),
    "aten._to_copy.default": SameOrder(),
    "aten.permute.default": Permute(),
    "aten.expand.default": Expand(),
    "aten.slice.Tensor": Slice(),
    "aten.cat.default": Concatenate(),
    "aten.index_select.default": Select(),
    "aten.constant_pad_nd.default": Pad(),
    "aten.where.self": Choose(),
    "trivet.copy_to_group.default": CopyToGroup(),
    "trivet.reduce_from_group.default": ReduceFromGroup(),
    "trivet.gather_from_group.default": GatherFromGroup(),
    "trivet.scatter_to_group.default": ScatterToGroup(),
    "trivet.gather_with_reduce_from_group.default": GatherWithReduce(),
    "trivet.reduce_scatter_to_group.default": ReduceScatter(),
}


def check(graph: Graph) -> None:
    """Refuse a graph before anything is bounded; the message names every node that cannot be, and why."""
    problems = []
    for node in graph.nodes[1:]:
        rule = RULES.get(node.operator)
        reason = "the operator has no rule" if rule is None else _refusal(node, rule)
        if reason is not None:
            problems.append(f"{node}: {reason}")
    if problems:
        supported = ", ".join(sorted(RULES))
        raise UnsupportedModelError(f"cannot bound {'; '.join(problems)}. Supported operators: {supported}")


def _refusal(node: Node, rule: Rule) -> str | None:
    return rule.refusal(node) if node.inputs else "it repeats a constant for each instance"


__all__ = ["RULES", "check"]
