"""Convolutions, transposed or not, of one to three dimensions, with constant kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.rules.affine import constant_only
from service.bounds.rules.base import LinearRule, Pulled, UnitRows
from service.bounds.windows import Windows


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
        flat, weight = coefficients.reshape(batch * rows, *node.shape), node.constant("weight")
        if weight.requires_grad:
            through = _adjoint(flat, weight, shape, _geometry(node))
        else:
            through = _Adjoint.apply(flat, weight, shape, _geometry(node))  # type: ignore[no-untyped-call]
        bias = None
        if node.arguments["bias"] is not None:
            bias = coefficients.flatten(3).sum(dim=3) @ node.constant("bias")
        return Pulled((through.reshape(batch, rows, *shape),), bias)

    def pull_units(self, node: Node, units: UnitRows, exchange: Exchange) -> Pulled | None:
        """The rows are the kernels, wherever they stand."""
        weight, bias = node.constant("weight"), node.arguments["bias"]
        if not _moves(node) or node.arguments["groups"] != 1 or exchange.axis.size > 1:
            return None
        grid = (node.shape[1], node.shape[2])
        channel = units.index // (grid[0] * grid[1])
        here = units.around(weight[channel], grid)
        windows = here.before(here.values, *_pairs(node, "stride", "padding"))
        if not windows.is_smaller(node.input_shapes[0]) or any(each != 1 for each in node.arguments["dilation"]):
            return None
        constant = None if bias is None else bias[channel]
        if constant is not None and units.mirrored:
            constant = torch.cat([constant, -constant], dim=1)
        return Pulled((windows,), constant)

    def pull_windows(self, node: Node, windows: Windows) -> Pulled | None:
        weight, bias = node.constant("weight"), node.arguments["bias"]
        if not _moves(node) or weight.requires_grad:
            return None
        stride, padding, dilation = _pairs(node, "stride", "padding", "dilation")
        kernel = weight.shape[2:]
        size = [
            step * (own - 1) + apart * (width - 1) + 1
            for step, own, apart, width in zip(stride, windows.size, dilation, kernel, strict=True)
        ]
        own = windows.clipped(node.shape)
        rows, shape = own.values.shape[:2], (node.input_shapes[0][0], *size)
        geometry = [list(stride), [0, 0], list(dilation), False, [0, 0], node.arguments["groups"]]
        through = _Adjoint.apply(own.values.flatten(0, 1), weight, shape, geometry)  # type: ignore[no-untyped-call]
        wider = own.before(through.reshape(*rows, *shape), stride, padding)
        return Pulled((wider,), None if bias is None else own.values.flatten(3).sum(dim=3) @ bias)


def _moves(node: Node) -> bool:
    """A convolution over images, not a transposed one."""
    return len(node.shape) == 3 and not node.arguments["transposed"]


def _pairs(node: Node, *names: str) -> list[tuple[int, int]]:
    given = [tuple(node.arguments[name]) for name in names]
    return [(each[0], each[-1]) for each in given]


def _adjoint(flat: Tensor, weight: Tensor, shape: tuple[int, ...], geometry: list[Any]) -> Tensor:
    """Torch's own covers every stride, padding, dilation and group; the input counts by its shape only."""
    like = flat.new_empty(1).expand(len(flat), *shape)
    through: Tensor = torch.ops.aten.convolution_backward(flat, like, weight, None, *geometry, [True, False, False])[0]
    return through


class _Adjoint(torch.autograd.Function):
    """The same for a constant kernel: its gradient is the convolution, where torch's is many times slower."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, weight: Tensor, shape: tuple[int, ...], geometry: list[Any]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry = geometry
        return _adjoint(flat, weight, shape, geometry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return torch.ops.aten.convolution(gradient, weight, None, *ctx.geometry), None, None, None


def _geometry(node: Node) -> list[Any]:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return [list(value) if isinstance(value := node.arguments[name], tuple) else value for name in names]
