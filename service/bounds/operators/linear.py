"""``linear`` and ``addmm``: products with a constant matrix along the last dimension, and the code that all such
products share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.flat import by_instance, by_row
from service.bounds.fused import product, product_in_ascent
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated, backward_rule
from service.bounds.linear.rows.block import Block, lengths
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.rows.structured import GatheredRows
from service.bounds.operators.allowance import Roundings, repeats, widened_by_magnitude
from service.bounds.operators.base import AccumulatingOperator
from service.bounds.operators.broadcasting import unbroadcast
from service.bounds.operators.sharding import Cut, Layer, Whole
from service.bounds.operators.stretches import stretch_of_matrix
from service.bounds.rank_group import RankGroup


class Affine(NamedTuple):
    """``x ↦ x·weightᵀ + bias`` with weight ``(out, in)`` and bias ``(out,)`` or none."""

    weight: Tensor
    bias: Tensor | None


AT_ONCE = 2**26
"""Entries of a weight of which absolute values are made at once: whole ones take as much memory as the weight."""


def _through_magnitudes(spread: Tensor, weight: Tensor) -> Tensor:
    """Return ``r |W|ᵀ``."""
    if weight.numel() <= AT_ONCE:
        return functional.linear(spread, weight.abs()) if weight.ndim == MATRIX else spread @ weight.abs().mT
    parts = torch.split(weight, max(1, AT_ONCE // max(weight.shape[1], 1)))
    return torch.cat([spread @ part.abs().mT for part in parts], dim=-1)


class AffineOperator(AccumulatingOperator):
    """Centre and radius forward: ``W c + b ± |W| r``, exact for independent inputs. Backward: ``A W``, ``A b``."""

    always_mixes = True
    makes_nan = False

    @abstractmethod
    def read(self, node: Node) -> Affine:
        """Return the constant matrix and bias of a node."""

    def stretch(self, node: Node) -> float:
        weight = self.read(node).weight
        return stretch_of_matrix(weight) if weight.ndim == MATRIX else super().stretch(node)

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        layer, (centre, spread) = self.read(node), inputs[0].centred
        if layer.weight.ndim == MATRIX:
            centre = functional.linear(centre, layer.weight, layer.bias)
        else:
            centre = centre @ layer.weight.mT
            centre = centre if layer.bias is None else centre + layer.bias
        return Interval.around(centre, _through_magnitudes(spread, layer.weight))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        layer = self.read(node)
        through = unbroadcast(product(coefficients, layer.weight), node.input_shapes[0])
        return Propagated((through,), _constant(layer, coefficients))

    def backward_in_ascent(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        layer = self.read(node)
        through = unbroadcast(product_in_ascent(coefficients, layer.weight), node.input_shapes[0])
        return Propagated((through,), _constant(layer, coefficients))

    def backward_onto(self, node: Node, coefficients: Tensor, total: Tensor) -> Tensor | None:
        layer = self.read(node)
        if layer.weight.ndim == 2:
            total.view(-1, layer.weight.shape[1]).addmm_(coefficients.reshape(-1, layer.weight.shape[0]), layer.weight)
        else:
            total.add_(unbroadcast(coefficients @ layer.weight, node.input_shapes[0]))
        return _constant(layer, coefficients)

    @backward_rule(IdentityRows)
    def backward_identity(self, node: Node, units: IdentityRows, tp_group: RankGroup) -> Propagated | None:
        layer = self.read(node)
        if node.size != node.shape[-1] or layer.weight.ndim != MATRIX:
            return None
        bias = None if layer.bias is None else units.select(layer.bias)
        if tp_group.axis.size > 1 or layer.weight.requires_grad:
            rows = units.select(layer.weight)
            return Propagated((rows.reshape(*rows.shape[:2], *node.input_shapes[0]),), bias)
        return Propagated((GatheredRows(layer.weight, units.index, units.mirrored),), bias)

    def within(self, node: Node, block: Block) -> tuple[Node, tuple[Block, ...]] | None:
        (shape,) = node.input_shapes
        if self.read(node).weight.ndim != MATRIX or shape[:-1] != node.shape[:-1]:
            return None
        if block[-1] != (0, node.shape[-1]):
            return None
        before = (*block[:-1], (0, shape[-1]))
        return replace(node, shape=lengths(block), input_shapes=(lengths(before),)), (before,)

    def roundings(self, node: Node) -> Roundings:
        return Roundings(max(self.read(node).weight.shape[-2:]) + repeats(node) + 8, node.size + 8)

    def widened(self, node: Node, inputs: Sequence[Interval], computed: Interval, tp_group: RankGroup) -> Interval:
        return widened_by_magnitude(node, computed, *self.error(node, inputs, tp_group))

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Whole:
        return Whole("it adds up over what is divided, and is no layer that may")

    def layer(self, node: Node) -> Layer | None:
        found = self.read(node)
        if found.weight.ndim != MATRIX:
            return None
        name, last = "aten.linear.default", len(node.shape) - 1
        return Layer(name, {"input": None}, found.weight, found.bias, last, len(node.input_shapes[0]) - 1, 0, 1)


MATRIX = 2


BY_ROW = 2
"""Dimensions of one number for each row of each instance."""


def _constant(layer: Affine, coefficients: Tensor) -> Tensor | None:
    if layer.bias is None:
        return None
    constant = coefficients @ layer.bias
    if constant.ndim == BY_ROW or constant.shape[2:].numel() == 1:
        return by_instance(constant)
    return by_row(constant).sum(dim=2)


def constant_only(node: Node, *arguments: str) -> str | None:
    variable = [name for name in arguments if node.is_variable(name)]
    return f"its {' and '.join(variable)} would have to be constant" if variable else None


class Linear(AffineOperator):
    """``aten.linear(input, weight, bias)``."""

    overloads = ("aten.linear.default",)
    composite = True

    def refusal(self, node: Node) -> str | None:
        return constant_only(node, "weight", "bias")

    def read(self, node: Node) -> Affine:
        return Affine(node.constant("weight"), None if node.arguments["bias"] is None else node.constant("bias"))


class AddMatrixProduct(AffineOperator):
    """``aten.addmm(self, mat1, mat2)`` = ``beta·self + alpha·mat1·mat2``, variable in ``mat1``."""

    overloads = ("aten.addmm.default",)

    def refusal(self, node: Node) -> str | None:
        return constant_only(node, "self", "mat2")

    def read(self, node: Node) -> Affine:
        bias = node.constant("self").expand(1, node.shape[0])[0]
        return Affine(node.constant("mat2").mT * node.arguments["alpha"], bias * node.arguments["beta"])
