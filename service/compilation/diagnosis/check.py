"""Checks whether a captured graph fails when it is compiled; a reproduction's script has these functions unchanged."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def evaluate(
    function: Callable[..., Any], inputs: Sequence[Any], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return outputs of ``function``, and gradients of their sum for inputs that require one, in ``dtype`` if given."""
    given = [fresh(value, dtype) for value in inputs]
    outputs = function(*given)
    found = [value for value in (outputs if isinstance(outputs, tuple | list) else [outputs]) if torch.is_tensor(value)]
    reached = [value for value in found if value.requires_grad]
    leaves = [value for value in given if torch.is_tensor(value) and value.requires_grad]
    if reached and leaves:
        total = torch.stack([(value * weights(value)).sum() for value in reached]).sum()
        found += [value for value in torch.autograd.grad(total, leaves, allow_unused=True) if value is not None]
    return [value.detach() for value in found]


def weights(value: torch.Tensor) -> torch.Tensor:
    """Return weights that differ for every element, so that errors do not cancel in the sum."""
    return torch.linspace(0.5, 1.5, value.numel(), device=value.device).reshape(value.shape)


def fresh(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a copy that may be overwritten and differentiated."""
    if not torch.is_tensor(value):
        return value
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to(wanted, copy=True).requires_grad_(value.requires_grad)


def difference(
    function: Callable[..., Any], compiled: Callable[..., Any], inputs: Sequence[Any], absolute: float, ratio: float
) -> str:
    """Describe the fault of ``compiled``, empty if it is within ``ratio`` times eager's distance from float64."""
    eager = evaluate(function, inputs)
    try:
        exact: list[Any] = evaluate(function, inputs, torch.float64)
    except (RuntimeError, TypeError):
        exact = [None] * len(eager)
    try:
        found = evaluate(compiled, inputs)
    except Exception as error:
        return " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:2]])
    if [(value.shape, value.dtype) for value in found] != [(value.shape, value.dtype) for value in eager]:
        return "results differ in number, shape or dtype"
    for index, (ours, theirs, truth) in enumerate(zip(found, eager, exact, strict=True)):
        if torch.allclose(ours, theirs, rtol=absolute, atol=absolute, equal_nan=True):
            continue
        if truth is not None and distance(ours, truth) <= ratio * distance(theirs, truth) + absolute / 10:
            continue
        return f"result {index} is off by {distance(ours, theirs):.3g} (root mean square)"
    return ""


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).square().mean().sqrt()) if one.numel() else 0.0
