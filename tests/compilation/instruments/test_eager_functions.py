"""What is seen of the eager code around compiled modules: what it reads, and what it sends to the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from service.compilation.instruments.functions import EagerFunctions, FunctionCall
from service.compilation.instruments.transfers import Transfers
from service.parallel.boundary.lifetimes import address_of

READING: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, other: x + other,
    lambda x, other: other.copy_(x),
    lambda x, other: x.add_(1),
    lambda x, other: torch.stack([other, x]),
    lambda x, other: x.clone(),
    lambda x, other: x.sum().item(),
    lambda x, other: x.tolist(),
    lambda x, other: bool(x.any()),
    lambda x, other: f"{x}",
    lambda x, other: torch.equal(other, x),
    lambda x, other: other.__setitem__(0, x[0]),
    lambda x, other: x.numpy().sum(),
    lambda x, other: x.detach().view(-1)[:2].mean(),
]
ASKING: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, other: x.shape,
    lambda x, other: (x.size(), x.dim(), x.numel(), x.dtype, x.device, len(x)),
    lambda x, other: x.detach(),
    lambda x, other: x[0].view(-1),
    lambda x, other: list(x),
    lambda x, other: torch.zeros_like(x),
    lambda x, other: x.new_ones(3),
    lambda x, other: other.view_as(x),
    lambda x, other: other.to(x),
    lambda x, other: x.requires_grad_().grad,
]


def reads(use: Callable[[Tensor, Tensor], Any]) -> bool:
    """Whether ``use`` is seen to read its first argument, or a view of it."""
    x, other, found = torch.ones(2, 2), torch.ones(2, 2), []

    def around(call: FunctionCall) -> Any:
        result = call.run()
        given = [each for value in call.arguments for each in (value if isinstance(value, list) else [value])]
        own = [each for each in given if isinstance(each, Tensor) and address_of(each) == address_of(x)]
        found.extend(call.reads(each, result) for each in own)
        return result

    with EagerFunctions(around, lambda: None, in_backwards=False).active():
        use(x, other)
    return any(found)


@pytest.mark.parametrize("use", READING)
def test_what_needs_a_tensors_numbers_reads_it(use: Callable[[Tensor, Tensor], Any]) -> None:
    assert reads(use)


@pytest.mark.parametrize("use", ASKING)
def test_what_needs_its_shape_or_a_view_of_it_does_not(use: Callable[[Tensor, Tensor], Any]) -> None:
    assert not reads(use)


def seen(run: Callable[[EagerFunctions], Any], *, in_backwards: bool = False) -> list[str]:
    names: list[str] = []

    def around(call: FunctionCall) -> Any:
        names.append(call.name)
        return call.run()

    functions = EagerFunctions(around, lambda: names.append("a backward"), in_backwards=in_backwards)
    with functions.active():
        run(functions)
    return names


def test_threads_that_are_started_meanwhile_are_seen_too() -> None:
    def run(_: EagerFunctions) -> None:
        thread = threading.Thread(target=lambda: torch.ones(1).exp())
        thread.start()
        thread.join()

    assert "exp" in seen(run)
    assert not _get_current_function_mode_stack()


class Other(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_suspended_it_sees_nothing_and_leaves_other_modes_where_they_are() -> None:
    def run(functions: EagerFunctions) -> None:
        with Other() as other:
            with functions.suspended():
                torch.ones(1).exp()
                assert _get_current_function_mode_stack() == [other]
            torch.ones(1).sin()

    names = seen(run)
    assert "sin" in names
    assert "exp" not in names


@pytest.mark.parametrize("in_backwards", [False, True])
@pytest.mark.parametrize("by", [lambda loss: loss.backward(), torch.autograd.backward])
def test_hooks_of_a_backward_are_seen_where_no_compiler_can_run(in_backwards: bool, by: Any) -> None:
    def run(_: EagerFunctions) -> None:
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda gradient: gradient.exp())
        by(y.sum())

    names = seen(run, in_backwards=in_backwards)
    assert names.count("a backward") == 1
    assert ("exp" in names) == in_backwards


def test_only_what_is_on_the_device_is_copied_to_the_host() -> None:
    device, x = torch.device("cpu"), torch.ones(2)
    transfers = Transfers(device, lambda tensor: address_of(tensor) == address_of(x))

    def address_after(name: str, *arguments: Any, of: Tensor = x, **named: Any) -> int:
        call = FunctionCall(getattr(Tensor, name), (of, *arguments), named)
        return address_of(transfers.run(call))

    host = torch.zeros(2)
    assert address_after("cpu", of=host) == address_of(host)
    assert address_after("cpu") != address_of(x)
    assert address_after("type", "torch.FloatTensor") != address_of(x)
    assert address_after("type", torch.float32) == address_of(x)
    assert address_after("to", device) == address_of(x)
    assert address_after("to", torch.device("cpu")) != address_of(x)


def test_a_copy_to_the_host_passes_gradients_on() -> None:
    x = torch.ones(2, requires_grad=True)
    transfers = Transfers(torch.device("cpu"), lambda tensor: True)
    transfers.run(FunctionCall(Tensor.cpu, (x,), {})).sum().backward()
    assert x.grad is not None


def test_the_end_of_a_backward_is_told_after_its_beginning_and_once() -> None:
    told: list[str] = []
    x = torch.ones(2, requires_grad=True)
    functions = EagerFunctions(
        lambda call: call.run(),
        lambda: told.append(f"begins, {x.grad is not None}"),
        lambda: told.append(f"ended, {x.grad is not None}"),
        in_backwards=False,
    )
    with functions.active():
        x.sum().backward()  # type: ignore[no-untyped-call]
    assert told == ["begins, False", "ended, True"]
