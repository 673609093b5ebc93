"""Whole steps near a whole number, where a last bit decides about one."""

from __future__ import annotations

import numpy as np
import torch
from nets import output_bounds, prepared
from onnx_models import model, node
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.onnx.reading import Runtime, parse

LOWER, UPPER = [0.59260272979736328125, 0.782698690891265869140625], [1.46150493621826171875, 1.115889072418212890625]
WEIGHT, BIAS = np.array([[7.4328337], [-9.698888]], np.float32), np.array([6.418165], np.float32)


class Steps(nn.Module):
    """Steps of an affine function, whose least value over the box is just below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(WEIGHT.T.copy()))
        self.bias = nn.Parameter(torch.from_numpy(BIAS))

    def forward(self, x: Tensor) -> Tensor:
        z = nn.functional.linear(x, self.weight, self.bias)
        return torch.cat([torch.floor(z), torch.ceil(-z), torch.round(z + 0.5)], dim=1)


def test_a_step_that_is_taken_at_a_corner_is_in_the_bounds() -> None:
    data = model([node("Gemm", ["x", "w", "b"], "h"), node("Floor", ["h"])], [1, 2], {"w": WEIGHT, "b": BIAS})
    corner = np.array([LOWER[0], UPPER[1]])
    assert Runtime.of(parse(data)).flat(corner) == [-1]
    network = prepared(Steps(), 2)
    small = np.subtract(corner, [0, 1e-7]).tolist(), np.add(corner, [1e-7, 0]).tolist()
    for low, high in ((LOWER, UPPER), (corner.tolist(), corner.tolist()), small):
        for method in ("ibp", "crown-ibp", "crown"):
            found = output_bounds(network, Interval(torch.tensor([low]), torch.tensor([high])), method)
            assert found.lower[0, 0] <= -1 + 1e-5
            assert found.upper[0, 1] >= 1 - 1e-5


class Signed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([(255 * x).floor(), torch.relu(x - 0.5).floor(), (-(-3 * x)).reshape(-1, 1).floor()], dim=1)


def test_no_step_is_added_below_what_is_never_negative() -> None:
    found = output_bounds(prepared(Signed(), 1), Interval(torch.zeros(1, 1), torch.ones(1, 1)), "ibp")
    assert found.lower.tolist() == [[0, 0, 0]]
    assert found.upper.tolist() == [[255, 0, 3]]
