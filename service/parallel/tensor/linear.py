"""Linear layers divided over tensor-parallel ranks (Megatron-LM, Shoeybi et al., 2019).

A column-parallel layer followed by elementwise functions and a row-parallel layer costs one all-reduce forward (in
the row layer) and one backward (in the column layer). A model may do either communication itself, in another form
(see ``stream``): layers with ``copied_input`` or ``partial_output`` leave it to their caller.

A zero-bubble pipeline (Qi et al., 2023) sends the gradient of a stage's input first and fills idle time with the
gradients of its weights. Both belong to one autograd node, so the node itself leaves the second half in a queue of
:class:`WeightGradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from service.parallel.collectives import copy_to_group, gather_from_group, reduce_from_group, scatter_to_group
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor.placement import divided, is_exporting, local


class WeightGradients:
    """Weight gradients of one backward that are still to be computed; holds the inputs and output gradients."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, weight: Tensor, x: Tensor, gradient: Tensor) -> None:
        self._pending.append((weight, x, gradient))

    def flush(self) -> int:
        """Add all of them to their parameters' ``grad``, first come first; returns how many there were."""
        count = len(self._pending)
        with torch.no_grad():
            while self._pending:
                weight, *factors = self._pending.pop(0)
                _accumulate(weight, _weight_gradient(*factors))
        return count


# Not a context variable: with activation checkpointing a layer runs again on the threads of the autograd engine.
_active: list[WeightGradients] = []


@contextmanager
def splitting_backward(queue: WeightGradients) -> Iterator[None]:
    """Split linear layers within: those that run forward here can be split; those that run backward here leave their
    weights to ``queue``.

    Wrap both passes of a micro-batch; one that runs backward outside computes everything at once.
    """
    _active.append(queue)
    try:
        yield
    finally:
        _active.pop()


def _is_splitting_backward() -> bool:
    """Return whether layers that run now are to be split."""
    # The compiler comes first: a graph that looked at the queues would be guarded by them.
    return not torch.compiler.is_compiling() and bool(_active) and torch.is_grad_enabled()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x Wᵀ + b`` with parameters as the layer holds them (plain, or DTensors whose local part is meant).

    Traced and compiled graphs, and layers outside :func:`splitting_backward`, get the ordinary operator.
    """
    own_bias = None if bias is None else local(bias)
    if not _is_splitting_backward() or not weight.requires_grad:
        return functional.linear(x, local(weight), own_bias)
    return _SplitBackwardLinear.apply(x, weight, own_bias)  # type: ignore[no-any-return,no-untyped-call]


class _SplitBackwardLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The parameter itself: activation checkpointing would hand back a detached copy, which is no leaf.
        ctx.weight = weight
        ctx.save_for_backward(x)
        return functional.linear(x, local(weight), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        for_x, for_weight, for_bias = ctx.needs_input_grad
        x_gradient = gradient @ local(weight) if for_x else None
        bias_gradient = gradient.flatten(0, -2).sum(0) if for_bias else None
        if not for_weight:
            return x_gradient, None, bias_gradient
        if _active:
            # Detached, so that the queue holds values and no graph. The parameter itself is the leaf to add to.
            _active[-1].add(weight, x.detach(), gradient.detach())
            return x_gradient, None, bias_gradient
        return x_gradient, _like_parameter(weight, _weight_gradient(x, gradient)), bias_gradient


def _weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def _like_parameter(weight: Tensor, gradient: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return gradient
    return DTensor.from_local(gradient, weight.device_mesh, weight.placements, run_check=False)


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    if weight.grad is None:
        weight.grad = _like_parameter(weight, gradient)
    else:
        local(weight.grad).add_(gradient)


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``x Wᵀ + b`` with parameters as a layer holds them; a layer's may be replaced (float8)."""


class ColumnParallelLinear(nn.Module):
    """``x Wᵀ + b`` with the rows of W (the output features) divided over ``axis``.

    Input ``(…, in_features)``, replicated. Output ``(…, out_features / tp)``, this rank's features; whole and
    replicated with ``gather_output``. With ``copied_input`` the caller sums the gradient of the input over the ranks
    (``copy_to_group``), once for several layers.
    """

    sharded = {"weight": 0, "bias": 0}  # noqa: RUF012 - a constant of the class
    product: Product = staticmethod(_linear)

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


def joint(layers: Sequence[ColumnParallelLinear], x: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of several layers with ``copied_input`` for one input, as one product of their rows. Either
    all or none of them have a bias.

    A product over few output features leaves a device half empty; the parameters stay apart. Where weight
    gradients are left for later, or a graph is exported for reading, each layer has its own product.
    """
    if _is_splitting_backward() or is_exporting():
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
    product: Product = staticmethod(_linear)

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


class OnEveryRank(nn.Module):
    """Calls ``module`` with this rank's parameters, which are DTensors where the mesh has ``tp`` ranks.

    Inputs and outputs are replicated; the module's ``forward`` must not depend on the rank.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        whole = dict(self.module.named_parameters())
        if not any(isinstance(parameter, DTensor) for parameter in whole.values()):
            return self.module(*inputs)  # as the tracer of ONNX needs it
        own = {name: local(parameter) for name, parameter in whole.items()}
        return torch.func.functional_call(self.module, own, inputs)
