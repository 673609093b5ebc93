"""Operands that are broadcast to the output of an operator, and dimensions counted with the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.graph import Node, Repeated


def unbroadcast(coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return coefficients ``(b, rows, *out)`` on a value that was broadcast from ``shape``: ``(b, rows, *shape)``."""
    while coefficients.ndim - 2 > len(shape):
        coefficients = coefficients.sum(dim=2)
    stretched = [index + 2 for index, length in enumerate(shape) if length == 1 and coefficients.shape[index + 2] != 1]
    return coefficients.sum(dim=stretched, keepdim=True) if stretched else coefficients


def operand(node: Node, argument: str, like: Tensor) -> Tensor:
    """Return a constant number or tensor as a tensor of ``node.shape``."""
    value = node.arguments[argument]
    value = value.value if isinstance(value, Repeated) else value
    # A number is filled in on the device: a copy from the host would wait for all pending work of the device.
    tensor = value if isinstance(value, Tensor) else like.new_full((), value)
    if tensor.ndim > len(node.shape):
        tensor = tensor.squeeze(0)
    return tensor.to(like.dtype).expand(node.shape)


def sum_of_terms(coefficients: Tensor, values: Tensor) -> Tensor:
    """Return the sums of products ``(batch, rows)``; an infinite value whose coefficient is 0 adds nothing."""
    terms = coefficients * values
    return by_row(torch.where(coefficients == 0, torch.zeros_like(terms), terms)).sum(dim=2)


def dimension_of(node: Node) -> int:
    """Return the node's ``dim``, counted from 0 with the batch."""
    dimension = int(node.arguments["dim"])
    return dimension if dimension >= 0 else dimension + len(node.shape) + 1
