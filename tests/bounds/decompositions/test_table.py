from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lanes import first_fast
from torch import Tensor, nn
from torch.export import Dim, default_decompositions, export

from service.bounds.decompositions import DECOMPOSITIONS
from service.bounds.decompositions.table import decomposed

WHOLE = frozenset({"aten.silu.default", "aten.hardswish.default", "aten.softmax.int"})


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def functions() -> list[Callable[[Tensor], Tensor]]:
    return [
        lambda x: torch.softmax(nn.functional.silu(x), -1) + nn.functional.hardswish(x),
        lambda x: torch.einsum("bij,bkj->bik", x, x).tril().clamp(0, 6),
        lambda x: nn.functional.layer_norm(x, (4,)).transpose(1, 2).matmul(x).chunk(2, -1)[0],
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: nn.functional.interpolate(x, scale_factor=2.0, mode="linear").std(-1).logsumexp(-1),
    ]


@pytest.mark.parametrize("function", first_fast(2, functions()))
def test_programs_are_those_that_torch_export_makes(function: Callable[[Tensor], Tensor]) -> None:
    program = export(Function(function), (torch.zeros(3, 4, 4),), dynamic_shapes={"x": {0: Dim("batch")}})
    table = default_decompositions().materialize()
    for overload in [overload for overload in table if str(overload) in WHOLE]:
        del table[overload]
    whole = program.run_decompositions({**table, **DECOMPOSITIONS})
    assert str(decomposed(program, WHOLE, frozenset()).graph) == str(whole.graph)
