"""Under FSDP2 a CUDA graph copies its parameters in, as they lie elsewhere in every step; elsewhere it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config
from torch._inductor import compile_fx
from torch.distributed.fsdp import FSDPModule

from service.models.compiled import COMPILE_MODES, apply_compile, copying_inductor

MODE = COMPILE_MODES["reduce-overhead"].mode


class Layer(nn.Module):
    """Its buffer is updated by each forward, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum(0))
        return (x @ self.weight).tanh() * self.weight.sum()


class Sharded(FSDPModule, Layer):
    """Takes itself for sharded; which modules are is all that is asked."""

    def __new__(cls, *_: Any, **__: Any) -> Sharded:
        return nn.Module.__new__(cls)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, tuple[str, ...]]]]:
    """Of each graph that Inductor is given whether it is a backward, and the inputs that are to stay in their place;
    no code is generated.
    """
    seen: list[tuple[bool, tuple[str, ...]]] = []

    def inner(graph: torch.fx.GraphModule, _inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        places = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        static = tuple(places[index] for index in options["static_input_idxs"])
        seen.append((bool(options.get("is_backward")), static))
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx_inner", inner)
    with config.patch(enable_autograd_cache=False):
        yield seen
    torch._dynamo.reset()


def stepped(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.ones(2, 3)
    loss = module(x).sum()
    loss.backward()
    return loss.detach(), module.weight.grad, module.seen.clone()


def test_nothing_but_what_a_graph_updates_is_to_stay_in_its_place(graphs: list[tuple[bool, tuple[str, ...]]]) -> None:
    torch.manual_seed(0)
    layer, alike = Layer(), Layer()
    alike.load_state_dict(layer.state_dict())
    layer.compile(backend=copying_inductor, mode=MODE)
    for found, expected in zip(stepped(layer), stepped(alike), strict=True):
        torch.testing.assert_close(found, expected)
    (forward, kept), (backward, kept_by_backward) = graphs
    assert (forward, backward) == (False, True)
    assert len(kept) == 1, "the buffer, and no parameter"
    assert kept_by_backward == ()


@pytest.mark.parametrize("rung", list(COMPILE_MODES))
def test_it_is_what_cuda_graphs_are_compiled_by_under_fsdp_alone(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda _, **options: given.append(options["backend"]))
    compile_mode = COMPILE_MODES[rung]
    for module in (Sharded(), Layer()):
        apply_compile(module, compile_mode.backend, compile_mode.mode)
    assert given == [copying_inductor if rung == "reduce-overhead" else compile_mode.backend, compile_mode.backend]
