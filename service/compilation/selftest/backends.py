"""Defines compilers with a planted defect, at the place where a real compiler would have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from service.torch_internals.table import internal

aot_autograd = internal("torch._dynamo.backends.common.aot_autograd")


def _box(function: Callable[..., Any]) -> Callable[..., Any]:
    boxed: Callable[..., Any] = internal("torch._functorch._aot_autograd.utils.make_boxed_func")(function)
    return boxed


def _as_is(graph: fx.GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
    return _box(graph.forward)


def _altering(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a compiler whose code changes each result of the graph."""

    def compiler(graph: fx.GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
        return _box(lambda *values: [change(value) for value in graph(*values)])

    return compiler


def _delaying(graph: fx.GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Return a compiler whose code returns the results of the previous call, like stale memory."""
    last: list[list[Any]] = []

    def run(*values: Any) -> list[Any]:
        results = [each.clone() if isinstance(each, Tensor) else each for each in graph(*values)]
        last.append(results)
        return list(last.pop(0) if len(last) > 1 else results)

    return _box(run)


def _five_percent_off(value: Any) -> Any:
    return value * 1.05 if isinstance(value, Tensor) and value.is_floating_point() else value


wrong_gradients = aot_autograd(fw_compiler=_as_is, bw_compiler=_altering(_five_percent_off))
stale_gradients = aot_autograd(fw_compiler=_as_is, bw_compiler=_delaying)
stale_outputs = aot_autograd(fw_compiler=_delaying, bw_compiler=_as_is)
wrong_outputs = aot_autograd(fw_compiler=_altering(_five_percent_off), bw_compiler=_as_is)


def forgets_parameters(graph: fx.GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile to code whose output keeps a gradient of its own, none of which reaches a parameter."""

    def run(*values: Any) -> Any:
        with torch.no_grad():
            results = graph(*values)
        return [result.requires_grad_() if result.is_floating_point() else result for result in results]

    return run


def crashes(_graph: fx.GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
    raise RuntimeError("planted compiler crash")
