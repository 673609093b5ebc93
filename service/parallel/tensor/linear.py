"""Linear layers divided over tensor-parallel ranks (Megatron-LM, Shoeybi et al., 2019).

A column-parallel layer followed by elementwise functions and a row-parallel layer costs one all-reduce forward (in
the row layer) and one backward (in the column layer). A model may do either communication itself, in another form
(see ``stream``): layers with ``copied_input`` or ``partial_output`` leave it to their caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from service.parallel.collectives import copy_to_group, gather_from_group, reduce_from_group, scatter_to_group
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor.placement import divided, is_exporting, local
from service.parallel.tensor.split_backward import is_splitting_backward, linear

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``x Wᵀ + b`` with parameters as a layer holds them; a layer's may be replaced (float8)."""


class ColumnParallelLinear(nn.Module):
    """``x Wᵀ + b`` with the rows of W (the output features) divided over ``axis``.

    Input ``(…, in_features)``, replicated. Output ``(…, out_features / tp)``, this rank's features; whole and
    replicated with ``gather_output``. With ``copied_input`` the caller sums the gradient of the input over the ranks
    (``copy_to_group``), once for several layers.
    """

    sharded = {"weight": 0, "bias": 0}  # noqa: RUF012 - a constant of the class
    product: Product = staticmethod(linear)

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
        x = self.product(x, self.weight, self.bias)
        return gather_from_group(x, -1, self.axis.group, self.axis.size) if self.gather_output else x

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, tp={self.axis.size}"


class WholeLinear(nn.Module):
    """``x Wᵀ + b`` with the whole of W on every rank of ``axis``, for output features that do not divide over it.

    Input ``(…, in_features)``, replicated, whose gradient the caller sums over the ranks. Output ``(…, out_features)``,
    of which each rank may use another part: gradients of W and b are summed over the ranks here.
    """

    def __init__(self, in_features: int, out_features: int, axis: Axis = SINGLE, *, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.axis = in_features, out_features, axis
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to_group(local(self.weight), self.axis.group)
        bias = None if self.bias is None else copy_to_group(local(self.bias), self.axis.group)
        return functional.linear(x, weight, bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, whole on each of {self.axis.size}"


def joint(layers: Sequence[ColumnParallelLinear], x: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of several layers with ``copied_input`` for one input, as one product of their rows; all of
    them have a bias, or none.

    A product over few output features leaves a device half empty; the parameters stay apart. Where weight
    gradients are left for later, or a graph is exported for reading, each layer has its own product.
    """
    if is_splitting_backward() or is_exporting():
        return tuple(layer(x) for layer in layers)
    weights = [local(layer.weight) for layer in layers]
    biases = [local(layer.bias) for layer in layers if layer.bias is not None]
    product = layers[0].product(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return torch.split(product, [weight.shape[0] for weight in weights], dim=-1)


class RowParallelLinear(nn.Module):
    """``x Wᵀ + b`` with the columns of W (the input features) divided over ``axis``; b is added once, after the sum.

    Input ``(…, in_features / tp)``, this rank's features; whole and replicated with ``scatter_input``.
    Output ``(…, out_features)``, replicated. With ``partial_output`` it is this rank's summand, without a bias.
    """

    sharded = {"weight": 1}  # noqa: RUF012 - a constant of the class
    product: Product = staticmethod(linear)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis = SINGLE,
        *,
        bias: bool = True,
        scatter_input: bool = False,
        partial_output: bool = False,
    ) -> None:
        super().__init__()
        if partial_output and bias:
            raise ValueError("a bias is added after the sum, which a layer with partial_output leaves to its caller")
        self.in_features, self.out_features, self.axis = in_features, out_features, axis
        self.scatter_input, self.partial_output = scatter_input, partial_output
        self.weight = nn.Parameter(torch.empty(out_features, divided(in_features, axis, "in_features")))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.scatter_input:
            x = scatter_to_group(x, -1, self.axis.group, self.axis.size)
        if self.axis.size == 1 or self.partial_output:
            return self.product(x, self.weight, self.bias)
        x = reduce_from_group(self.product(x, self.weight, None), self.axis.group)
        return x if self.bias is None else x + local(self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, tp={self.axis.size}"


class OnEveryRank(nn.Module):
    """Calls ``module`` with this rank's parameters, which are DTensors where the mesh has ``tp`` ranks.

    Inputs and outputs are replicated; the module's ``forward`` must not depend on the rank.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        own = {name: local(parameter) for name, parameter in self.module.named_parameters()}
        return torch.func.functional_call(self.module, own, inputs)
