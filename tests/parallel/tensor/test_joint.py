"""Several layers of one input as one product, and where each keeps its own."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from service.parallel.tensor import ColumnParallelLinear, RowParallelLinear, joint
from service.parallel.tensor.linear import WeightGradients, splitting_backward
from service.parallel.tensor.placement import is_exporting

ROWS = (12, 4, 8)


class Three(nn.Module):
    """Layers as attention has them, and who asked whether a graph is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ColumnParallelLinear(6, rows, bias=False, copied_input=True) for rows in ROWS)
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return joint(list(self.layers), x)  # type: ignore[arg-type]


def products(graph: torch.fx.Graph) -> int:
    names = Counter(str(node.target) for node in graph.nodes if node.op == "call_function")
    return sum(count for name, count in names.items() if "linear" in name)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 6, dtype=torch.float64)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def apart(x: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs, gradients of weights and of the input, of layers that are called one by one."""
    model, own = Three(), x.clone().requires_grad_()
    outputs = [layer(own) for layer in model.layers]
    torch.cat(outputs, -1).sin().sum().backward()
    assert own.grad is not None
    return outputs, gradients(model), own.grad


def test_one_product_gives_what_each_layer_gives(x: Tensor) -> None:
    outputs, wanted, of_x = apart(x)
    model, own = Three(), x.clone().requires_grad_()
    with patch.object(ColumnParallelLinear, "product", wraps=ColumnParallelLinear.product) as product:
        found = model(own)
    assert product.call_count == 1
    torch.cat(found, -1).sin().sum().backward()
    torch.testing.assert_close(list(found), outputs, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.grad, of_x, rtol=1e-12, atol=1e-12)


def test_layers_whose_weight_gradients_wait_keep_their_own_products(x: Tensor) -> None:
    _, wanted, of_x = apart(x)
    model, own, queue = Three(), x.clone().requires_grad_(), WeightGradients()
    with splitting_backward(queue):
        torch.cat(model(own), -1).sin().sum().backward()
    assert gradients(model) == []
    torch.testing.assert_close(own.grad, of_x, rtol=1e-12, atol=1e-12)
    assert queue.flush() == len(ROWS)
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-12, atol=1e-12)


def test_an_exported_graph_has_a_product_per_layer_and_a_compiled_one_a_single_one(x: Tensor) -> None:
    """Nobody reads what is compiled; parameters of an exported graph are to be found in products."""
    program = torch.export.export(Three(), (x,))
    assert products(program.graph) == len(ROWS)
    graphs: list[torch.fx.Graph] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(module.graph)
        return module

    torch.compile(Three(), fullgraph=True, backend=backend)(x)
    assert [products(graph) for graph in graphs] == [1]


def test_who_is_reading_is_known() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if is_exporting() else x + 2

    zero = torch.zeros(())
    assert Asking()(zero) == 2
    assert torch.compile(Asking(), fullgraph=True, backend="eager")(zero) == 2
    assert torch.export.export(Asking(), (zero,)).module()(zero) == 1


def test_a_summand_has_no_bias() -> None:
    with pytest.raises(ValueError, match="a bias is added after the sum"):
        RowParallelLinear(4, 4, partial_output=True)
