"""Convolutions, transposed or not, of one to three dimensions, with constant kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.rules.affine import constant_only
from service.bounds.rules.base import LinearRule, Pulled


class Convolution(LinearRule):
    """``aten.convolution``: centre and radius forward, as for a matrix; the adjoint convolution backward."""

    def refusal(self, node: Node) -> str | None:
        return constant_only(node, "weight", "bias")

    def mixes(self, node: Node) -> bool:
        return True

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        weight, bias = node.constant("weight"), node.arguments["bias"]
        centre = torch.ops.aten.convolution(inputs[0].centre, weight, bias, *_geometry(node))
        radius = torch.ops.aten.convolution(inputs[0].radius, weight.abs(), None, *_geometry(node))
        return Interval.around(centre, radius)

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        batch, rows = coefficients.shape[:2]
        shape = node.input_shapes[0]
        flat = coefficients.reshape(batch * rows, *node.shape)
        # Its own adjoint in torch covers every stride, padding, dilation and group; the input counts by its shape only.
        like = coefficients.new_empty(1).expand(batch * rows, *shape)
        through = torch.ops.aten.convolution_backward(
            flat, like, node.constant("weight"), None, *_geometry(node), [True, False, False]
        )[0]
        bias = None
        if node.arguments["bias"] is not None:
            bias = coefficients.flatten(3).sum(dim=3) @ node.constant("bias")
        return Pulled((through.reshape(batch, rows, *shape),), bias)


def _geometry(node: Node) -> list[object]:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return [list(value) if isinstance(value := node.arguments[name], tuple) else value for name in names]
