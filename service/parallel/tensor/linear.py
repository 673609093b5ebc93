"""Linear layers divided over tensor-parallel ranks (Megatron-LM, Shoeybi et al., 2019).

A column-parallel layer followed by elementwise functions and a row-parallel layer costs one all-reduce forward (in
the row layer) and one backward (in the column layer).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from service.parallel.collectives import copy_to_group, gather_from_group, reduce_from_group, scatter_to_group
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor.deferred import linear
from service.parallel.tensor.placement import divided, local


class ColumnParallelLinear(nn.Module):
    """``x Wᵀ + b`` with the rows of W (the output features) divided over ``axis``.

    Input ``(…, in_features)``, replicated. Output ``(…, out_features / tp)``, this rank's features; whole and
    replicated with ``gather_output``. With ``copied_input`` the caller has already called ``copy_to_group``,
    so that several layers share its gradient all-reduce.
    """

    sharded = {"weight": 0, "bias": 0}  # noqa: RUF012 - a constant of the class

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis = SINGLE,
        *,
        bias: bool = True,
        gather_output: bool = False,
        copied_input: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.axis = in_features, out_features, axis
        self.gather_output, self.copied_input = gather_output, copied_input
        rows = divided(out_features, axis, "out_features")
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.copied_input:
            x = copy_to_group(x, self.axis.group)
        x = linear(x, self.weight, self.bias)
        return gather_from_group(x, -1, self.axis.group, self.axis.size) if self.gather_output else x

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, tp={self.axis.size}"


class RowParallelLinear(nn.Module):
    """``x Wᵀ + b`` with the columns of W (the input features) divided over ``axis``; b is added once, after the sum.

    Input ``(…, in_features / tp)``, this rank's features; whole and replicated with ``scatter_input``.
    Output ``(…, out_features)``, replicated.
    """

    sharded = {"weight": 1}  # noqa: RUF012 - a constant of the class

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis = SINGLE,
        *,
        bias: bool = True,
        scatter_input: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.axis = in_features, out_features, axis
        self.scatter_input = scatter_input
        self.weight = nn.Parameter(torch.empty(out_features, divided(in_features, axis, "in_features")))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.scatter_input:
            x = scatter_to_group(x, -1, self.axis.group, self.axis.size)
        if self.axis.size == 1:
            return linear(x, self.weight, self.bias)
        x = reduce_from_group(linear(x, self.weight, None), self.axis.group)
        return x if self.bias is None else x + local(self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, tp={self.axis.size}"
