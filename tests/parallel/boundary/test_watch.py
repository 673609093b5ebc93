"""What one step did with a model: calls of its parts, calls within a backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from service.parallel.boundary import StepBoundary, StepWatch, parts_of


class Block(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.inner, self.recomputes = nn.Linear(4, 4), recomputes

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Block(recomputes) for name in "01"})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def watched(model: nn.Module) -> StepWatch:
    """A step of three forwards with their backwards, and a call that the watch does not see."""
    boundary, watch = StepBoundary({"model": model}), StepWatch(parts_of(model))
    boundary.step_boundary(watch)
    with watch.over():
        for _ in range(3):
            boundary.boundary_call(model, torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4))
    return watch


def by_module(counts: Any) -> dict[str, int]:
    assert {(call.phase, call.shapes) for call in counts} <= {("train", ((2, 4),))}
    return {call.module: count for call, count in counts.items()}


def test_parts_are_counted_within_the_step_only_and_alike_ones_together() -> None:
    watch = watched(Model())
    assert by_module(watch.calls.counts()) == {"model": 3, "blocks": 6, "blocks.inner": 6}
    assert not watch.reentries.counts()


def test_what_a_backward_computes_again_is_a_reentry() -> None:
    watch = watched(Model(recomputes=True))
    assert by_module(watch.reentries.counts()) == {"blocks.inner": 6}
    assert by_module(watch.calls.counts())["blocks.inner"] == 12


@pytest.mark.parametrize(("whole", "expected"), [(True, {"model": 3}), (False, {"model": 3, "blocks": 6})])
def test_compiled_parts_are_heard_without_a_hook_in_their_graphs(
    monkeypatch: pytest.MonkeyPatch, whole: bool, expected: dict[str, int]
) -> None:
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    model, graphs = Model(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for module in [model] if whole else model.blocks.values():
        module.compile(backend=backend)
    model(torch.ones(2, 4))
    compiled = len(graphs)
    assert by_module(watched(model).calls.counts()) == expected
    assert len(graphs) == compiled, "nothing was compiled again because it was watched"
