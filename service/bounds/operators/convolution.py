"""Convolutions, transposed or not, of one to three dimensions, with constant kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated, backward_rule
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.rows.patches import Pair, Patches
from service.bounds.linear.rows.structured import GatheredRows
from service.bounds.operators.allowance import Roundings, widened_by_magnitude
from service.bounds.operators.base import LinearOperator
from service.bounds.operators.linear import constant_only
from service.bounds.operators.sharding import Cut, Layer, Share, Whole
from service.bounds.operators.stretches import stretch_of_kernel
from service.bounds.rank_group import RankGroup


class Convolution(LinearOperator):
    """``aten.convolution``: centre and radius forward, as for a matrix; the adjoint convolution backward."""

    overloads = ("aten.convolution.default",)
    makes_nan = False
    always_mixes = True
    is_fresh = True

    def refusal(self, node: Node) -> str | None:
        return constant_only(node, "weight", "bias")

    def patch_before(self, node: Node, index: int, patch: Pair) -> Pair | None:
        if node.arguments["transposed"]:
            return None
        (down, across), (apart, beside) = _pairs(node, "stride", "dilation")
        kernel = node.constant("weight").shape[2:]
        return (
            down * (patch[0] - 1) + apart * (kernel[0] - 1) + 1,
            across * (patch[1] - 1) + beside * (kernel[1] - 1) + 1,
        )

    def stretch(self, node: Node) -> float:
        stride, padding, dilation, transposed, _, groups = _geometry(node)
        if transposed:
            return super().stretch(node)
        size = max(length + 2 * pad for length, pad in zip(node.input_shapes[0][1:], padding, strict=True))
        return stretch_of_kernel(node.constant("weight"), stride, dilation, groups, size)

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        weight, bias = node.constant("weight"), node.arguments["bias"]
        centre, spread = inputs[0].centred
        centre = torch.convolution(centre, weight, bias, *_geometry(node))
        return Interval.around(centre, torch.convolution(spread, weight.abs(), None, *_geometry(node)))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        batch, rows = coefficients.shape[:2]
        shape = node.input_shapes[0]
        if (matrices := _matrices_of(node)) is not None:
            through = _through_matrices(coefficients, matrices).reshape(batch, rows, *shape)
            return Propagated((through,), _constant(node, coefficients))
        flat, weight = coefficients.reshape(batch * rows, *node.shape), node.constant("weight")
        if weight.requires_grad:
            through = _adjoint(flat, weight, shape, _geometry(node))
        else:
            through = _Adjoint.apply(flat, weight, shape, _geometry(node))  # type: ignore[no-untyped-call]
        return Propagated((through.reshape(batch, rows, *shape),), _constant(node, coefficients))

    @backward_rule(IdentityRows)
    def backward_identity(self, node: Node, units: IdentityRows, tp_group: RankGroup) -> Propagated | None:
        """Return the kernels as the rows, at whichever position, or those of a matrix."""
        weight, bias = node.constant("weight"), node.arguments["bias"]
        matrices = _matrices_of(node) if tp_group.axis.size == 1 and node.arguments["groups"] == 1 else None
        if matrices is not None:
            each = None if bias is None else units.select(bias.repeat_interleave(node.size // len(bias)))
            return Propagated((GatheredRows(matrices[0], units.index, units.mirrored),), each)
        if not _moves(node) or node.arguments["groups"] != 1 or tp_group.axis.size > 1:
            return None
        grid = (node.shape[1], node.shape[2])
        channel = units.index // (grid[0] * grid[1])
        here = units.around(weight[channel], grid)
        patches = here.before(here.values, *_pairs(node, "stride", "padding"))
        if not patches.is_worthwhile(node.input_shapes[0]) or any(each != 1 for each in node.arguments["dilation"]):
            return None
        constant = None if bias is None else bias[channel]
        if constant is not None and units.mirrored:
            constant = torch.cat([constant, -constant], dim=1)
        return Propagated((patches,), constant)

    @backward_rule(Patches)
    def backward_patches(self, node: Node, patches: Patches, tp_group: RankGroup) -> Propagated | None:
        weight, bias = node.constant("weight"), node.arguments["bias"]
        if not _moves(node) or weight.requires_grad:
            return None
        stride, padding, dilation = _pairs(node, "stride", "padding", "dilation")
        kernel = weight.shape[2:]
        size = [
            step * (own - 1) + apart * (width - 1) + 1
            for step, own, apart, width in zip(stride, patches.size, dilation, kernel, strict=True)
        ]
        own = patches.clipped(node.shape)
        rows, shape = own.values.shape[:2], (node.input_shapes[0][0], *size)
        geometry = [list(stride), [0, 0], list(dilation), False, [0, 0], node.arguments["groups"]]
        through = _Adjoint.apply(own.values.flatten(0, 1), weight, shape, geometry)  # type: ignore[no-untyped-call]
        wider = own.before(through.reshape(*rows, *shape), stride, padding)
        return Propagated((wider,), None if bias is None else own.values.flatten(3).sum(dim=3) @ bias)

    def roundings(self, node: Node) -> Roundings:
        weight = node.constant("weight")
        return Roundings(max(weight[0].numel(), weight[:, 0].numel()) + 8, node.size + 8)

    def widened(self, node: Node, inputs: Sequence[Interval], computed: Interval, tp_group: RankGroup) -> Interval:
        return widened_by_magnitude(node, computed, *self.error(node, inputs, tp_group))

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        """Return the input's cut if each channel is by itself, as in an average pool."""
        cut, groups = cuts[node.inputs[0]], int(node.arguments["groups"])
        by_itself = cut.dim == 0 and groups == cut.length == node.shape[0]
        return cut if by_itself else Whole("it joins channels, or pixels that are divided")

    def local_arguments(self, node: Node, cut: Cut, share: Share) -> dict[str, Any]:
        names = [name for name in ("weight", "bias") if node.arguments[name] is not None]
        constants = {name: share(node.constant(name), 0, cut, 0.0) for name in names}
        return {**node.arguments, **constants, "groups": cut.share}

    def layer(self, node: Node) -> Layer | None:
        if node.arguments["groups"] != 1:
            return None
        weight_out, weight_in = (1, 0) if node.arguments["transposed"] else (0, 1)
        weight, bias = node.constant("weight"), node.arguments["bias"]
        return Layer(node.operator, node.arguments, weight, bias, 0, 0, weight_out, weight_in)


def _moves(node: Node) -> bool:
    """Return a convolution over images, not a transposed one."""
    return len(node.shape) == 3 and not node.arguments["transposed"]


def _pairs(node: Node, *names: str) -> list[tuple[int, int]]:
    given = [tuple(node.arguments[name]) for name in names]
    return [(each[0], each[-1]) for each in given]


def _constant(node: Node, coefficients: Tensor) -> Tensor | None:
    if node.arguments["bias"] is None:
        return None
    return coefficients.flatten(3).sum(dim=3) @ node.constant("bias")


PRODUCTS_FOR_ONE, MATRIX = 1.5, 2**22
"""The number of products of a matrix that take as long as one of a convolution, on a CPU, and the entries of the
largest matrix.
"""
_matrices: WeakKeyDictionary[Node, Tensor] = WeakKeyDictionary()


def _matrices_of(node: Node) -> Tensor | None:
    """Return a convolution as a matrix for each group ``(groups, outputs, inputs)`` if that takes less time on
    a CPU; else ``None``.

    On an image hardly larger than the kernel, most of a convolution's products are with zeros around the image.
    """
    weight, shape, groups = node.constant("weight"), node.input_shapes[0], node.arguments["groups"]
    if weight.device.type != "cpu" or weight.requires_grad:
        return None
    used, _ = _cropped(weight, node.shape, shape, _geometry(node))
    # In both kinds of kernel the second dimension is each group's share of one side.
    products = used.numel() * prod(shape[1:] if node.arguments["transposed"] else node.shape[1:])
    outputs, inputs = node.size // groups, prod(shape) // groups
    if groups * outputs * inputs > min(MATRIX, PRODUCTS_FOR_ONE * products):
        return None
    if node not in _matrices:
        own = (outputs, groups, node.shape[0] // groups, *node.shape[1:])
        # The groups' rows side by side.
        rows = torch.eye(outputs, dtype=weight.dtype).reshape(outputs, 1, *own[2:]).expand(own).flatten(1, 2)
        with torch.no_grad():
            through = _adjoint(rows, weight, shape, _geometry(node))
        _matrices[node] = through.reshape(outputs, groups, inputs).transpose(0, 1).contiguous()
    return _matrices[node]


def _through_matrices(coefficients: Tensor, matrices: Tensor) -> Tensor:
    """Return the coefficients of inputs, flat, by a matrix for each group."""
    groups, outputs, inputs = matrices.shape
    if groups == 1:
        return coefficients.flatten(2) @ matrices[0]
    if outputs == inputs == 1:
        return coefficients.flatten(2) * matrices.flatten()
    apart = coefficients.reshape(-1, groups, outputs).transpose(0, 1)
    return torch.bmm(apart, matrices).transpose(0, 1)


def _cropped(
    weight: Tensor, own: tuple[int, ...], shape: tuple[int, ...], geometry: list[Any]
) -> tuple[Tensor, list[int]]:
    """Return a kernel without the part that lies outside the image at every position, and its padding.

    ``own`` is the shape of the outputs, and ``shape`` that of the inputs.
    """
    stride, padding, dilation, transposed, *_ = geometry
    left = [*padding]
    if transposed or set(dilation) != {1}:
        return weight, left
    for axis, (step, pad, kernel) in enumerate(zip(stride, padding, weight.shape[2:], strict=True)):
        before, behind = pad - (own[axis + 1] - 1) * step, kernel - shape[axis + 1] - pad
        if (crop := min(before, behind)) > 0:
            weight = weight.narrow(axis + 2, crop, kernel - 2 * crop)
            left[axis] = pad - crop
    return weight, left


def _adjoint(flat: Tensor, weight: Tensor, shape: tuple[int, ...], geometry: list[Any]) -> Tensor:
    """Return the coefficients of inputs ``(n, *shape)`` from those of outputs ``(n, out, height, width)``."""
    weight, padding = _cropped(weight, tuple(flat.shape[1:]), shape, geometry)
    stride, _, dilation, transposed, added, groups = geometry
    if weight[0].numel() == 1 and groups == len(weight) and set(stride) == {1} and not any((*padding, *added)):
        return flat * weight.reshape(-1, *(1 for _ in padding))
    geometry = [stride, padding, dilation, transposed, added, groups]
    is_dense = groups == 1 or set(stride) == {1}
    if len(shape) == IMAGE and not transposed and set(dilation) == {1} and is_dense:
        return _adjoint_of_images(flat, weight, shape, (stride[0], stride[-1]), (padding[0], padding[-1]), groups)
    # Torch's own covers all cases; the input counts by its shape only.
    like = flat.new_empty(1).expand(len(flat), *shape)
    through: Tensor = torch.ops.aten.convolution_backward(flat, like, weight, None, *geometry, [True, False, False])[0]
    return through


IMAGE = 3


def _adjoint_of_images(  # noqa: PLR0917 - a convolution has as many
    flat: Tensor, weight: Tensor, shape: tuple[int, ...], stride: tuple[int, int], padding: tuple[int, int], groups: int
) -> Tensor:
    """Return a convolution without stride whose channels are the inputs at each phase of the stride (Shi et al., 2016).

    Libraries' own adjoints with a stride, or onto few channels, are up to twenty times slower, except for groups with a
    stride.
    """
    kernel = _in_phases(weight, stride, groups)
    skipped = [
        _skipped(own, size, step, pad, kernel.shape[axis], weight.shape[axis])
        for axis, own, size, step, pad in zip((2, 3), flat.shape[2:], shape[1:], stride, padding, strict=True)
    ]
    around = [size - 1 - skip for size, skip in zip(kernel.shape[2:], skipped, strict=True)]
    phases = functional.conv2d(flat, kernel, padding=around, groups=groups)
    n, height, width = len(flat), phases.shape[2] * stride[0], phases.shape[3] * stride[1]
    if stride[0] == stride[1] > 1:
        whole = functional.pixel_shuffle(phases, stride[0])  # faster than a copy of a permuted view
    else:
        apart = phases.reshape(n, shape[0], *stride, *phases.shape[2:])
        whole = apart.permute(0, 1, 4, 2, 5, 3).reshape(n, shape[0], height, width)
    top, left = (pad - skip * step for pad, skip, step in zip(padding, skipped, stride, strict=True))
    # Inputs that no patch reached are beyond the end.
    below, behind = max(0, top + shape[1] - height), max(0, left + shape[2] - width)
    if below or behind:
        whole = functional.pad(whole, (0, behind, 0, below))
    return whole[:, :, top : top + shape[1], left : left + shape[2]]


def _skipped(own: int, size: int, step: int, pad: int, steps: int, kernel: int) -> int:  # noqa: PLR0917 - one axis
    """Return how many whole steps of padding need not be computed on each side; patches may end early at the far."""
    early = size + 2 * pad - kernel - (own - 1) * step
    return max(0, min((pad - early) // step, steps - 1))


def _in_phases(weight: Tensor, stride: tuple[int, int], groups: int) -> Tensor:
    """Return a kernel ``(out, in, height, width)`` as ``(groups · in · phases, out / groups, steps down, steps
    across)``, turned around; each group has its share of ``out``.
    """
    steps = [-(-size // step) for size, step in zip(weight.shape[2:], stride, strict=True)]
    below, behind = (count * step - size for count, step, size in zip(steps, stride, weight.shape[2:], strict=True))
    filled = functional.pad(weight, (0, behind, 0, below)) if below or behind else weight
    apart = filled.reshape(groups, -1, weight.shape[1], steps[0], stride[0], steps[1], stride[1])
    return apart.permute(0, 2, 4, 6, 1, 3, 5).reshape(-1, len(weight) // groups, *steps).flip(2, 3)


class _Adjoint(torch.autograd.Function):
    """The adjoint for a constant kernel: its gradient is the convolution; torch's is many times slower."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, weight: Tensor, shape: tuple[int, ...], geometry: list[Any]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry = geometry
        return _adjoint(flat, weight, shape, geometry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return torch.convolution(gradient, weight, None, *ctx.geometry), None, None, None


def _geometry(node: Node) -> list[Any]:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return [list(value) if isinstance(value := node.arguments[name], tuple) else value for name in names]
