"""Any use of a compiled module about which the monitor is silent gives, under replays, what it gives without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from lanes import examples
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from service.compilation.instruments.replays import Replays
from service.compilation.monitor.boundary_monitor import monitored
from service.compilation.monitor.results import ResultLifetimes
from service.compilation.monitor.usage import Usage
from service.models.compiled import apply_compile
from service.parallel.boundary import CallSite, Origin


class Heard(TorchFunctionMode):
    """Hears which torch functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.names.append(str(getattr(function, "__name__", function)))
        return function(*arguments, **(named or {}))


OPERATIONS = ("mark", "forward", "backward", "backward of the first", "infer", "hold", "read", "drop", "step")
mark = torch.compiler.cudagraph_mark_step_begin


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)).square())


@dataclass
class Run:
    """A program: operations one after another."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    waiting: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    told: list[Tensor] = field(default_factory=list)
    number: int = 0

    def all(self, operations: list[str]) -> None:
        for self.number, operation in enumerate(operations):
            getattr(self, "_" + operation.replace(" ", "_"))()

    def _batch(self) -> Tensor:
        return torch.randn(2, 3, generator=torch.Generator().manual_seed(self.number))

    def _mark(self) -> None:
        mark()  # type: ignore[no-untyped-call]

    def _forward(self) -> None:
        self.waiting.append(self.model(self._batch()).square().mean())

    def _backward(self) -> None:
        if self.waiting:
            torch.stack(self.waiting).sum().backward()
            self.waiting.clear()

    def _backward_of_the_first(self) -> None:
        if self.waiting:
            self.waiting.pop(0).backward()

    def _infer(self) -> None:
        with torch.no_grad():
            self.told.append(self.model(self._batch()).sum())

    def _hold(self) -> None:
        with torch.no_grad():
            self.held.append(self.model(self._batch()))

    def _read(self) -> None:
        self.told.extend(each.clone() for each in self.held)

    def _drop(self) -> None:
        self.held.clear()

    def _step(self) -> None:
        if not self.waiting:  # or their backward would find other weights than their forward
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def results(self) -> list[Tensor]:
        return [*self.told, *(value.detach().clone() for value in self.model.parameters())]


@dataclass
class Replayed:
    """A module under replay, from example to example."""

    model: nn.Module
    replays: Replays
    start: dict[str, Tensor]
    examples: Iterator[int] = field(default_factory=lambda: count(1))

    def restored(self, model: nn.Module) -> Run:
        model.load_state_dict(self.start)
        return Run(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def run(self, operations: list[str]) -> tuple[Usage, list[Tensor]]:
        run, example = self.restored(self.model), next(self.examples)
        for parameter in self.model.parameters():
            parameter.grad = None
        with monitored({"scorer": self.model}, dict(self.model.named_parameters())) as monitor:
            self.replays.generation = lambda: 1000 * example + monitor.generation
            run.all(operations)
            results = run.results
            run.waiting.clear()
            run.held.clear()
            return monitor.usage(), results


@pytest.fixture(scope="module")
def replayed(_quick_to_search: None) -> Iterator[Replayed]:
    """Make a module whose replays are rehearsed, for all examples."""
    torch.compiler.reset()
    torch.manual_seed(0)
    replays, model = Replays(torch.device("cpu")), Scorer()
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    apply_compile(model, replays.backend)
    yield Replayed(model, replays, start)
    torch.compiler.reset()


def silent(usage: Usage) -> bool:
    alarms = ([mark for mark in usage.marks if mark.pending], usage.reads, usage.held, usage.gradients)
    return not any(alarms) and not any(each.begins for each in usage.reentries)


def differ(results: list[Tensor], expected: list[Tensor]) -> bool:
    """By more than the last bits, which depend on how memory is aligned."""
    pairs = zip(results, expected, strict=True)
    return any(not torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs)


@settings(
    max_examples=examples(25, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(operations=st.lists(st.sampled_from(OPERATIONS), min_size=2, max_size=14))
def test_silence_means_right_results(replayed: Replayed, operations: list[str]) -> None:
    expected = replayed.restored(Scorer())
    expected.all(operations)
    usage, results = replayed.run(operations)
    event("silent" if silent(usage) else "alarmed")
    wrong = differ(results, expected.results)
    event("wrong" if wrong else "right")
    assert not (wrong and silent(usage)), (operations, usage)


@pytest.mark.parametrize(
    "operations",
    [
        ["forward", "mark", "forward", "backward", "step"],
        ["forward", "forward", "backward of the first", "forward", "forward", "backward", "step"],
        ["hold", "infer", "read"],
        ["forward", "backward", "forward", "backward", "step"],
    ],
)
def test_alarms_are_for_results_that_do_go_wrong(replayed: Replayed, operations: list[str]) -> None:
    expected = replayed.restored(Scorer())
    expected.all(operations)
    usage, results = replayed.run(operations)
    assert not silent(usage)
    assert differ(results, expected.results)


def test_every_gradient_that_is_added_to_over_a_mark_is_told(replayed: Replayed) -> None:
    usage, _ = replayed.run(["mark", "forward", "backward", "mark", "forward", "backward", "step"])
    assert {each.parameter for each in usage.gradients} == {name for name, _ in replayed.model.named_parameters()}


def test_who_watches_does_not_hear_itself() -> None:
    """A tensor that CUDA graphs have invalidated raises when it is asked where it is: that is no read."""
    results, origin = ResultLifetimes({}, {}), Origin("scorer", CallSite("loop.py", 1, "step"), 0)
    result = torch.ones(2)
    with Heard() as heard:
        for generation in range(1, 5):
            results.note(origin, [result])
            results.begin(generation)
            for tensor, output in results.overwritten_in([result]):
                results.read(tensor, output, origin.site, generation)
    assert heard.names == []
