"""Tensors move together, and a device is waited for once, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from service.compilation.run.copies import LARGE, _moved, _wider_first, near, read
from service.compilation.run.oracles import Oracle
from service.compilation.run.parity import Pairs, compare_all, compare_running_on
from service.jobs.spec.compile import Tolerance
from service.parallel.containers import in_batches

MIXED = {
    "weights": torch.randn(3, 5),
    "truth": torch.randn(7, dtype=torch.float64),
    "counts": torch.arange(6).view(2, 3),
    "turned": torch.randn(4, 3, dtype=torch.bfloat16).T,
    "flags": torch.tensor([True, False, True]),
    "loss": torch.tensor(0.5),
}


@pytest.mark.parametrize("most", [1, 24, 1 << 20])
def test_what_moves_together_arrives_as_it_was(most: int) -> None:
    arrived: dict[str, Tensor] = {}
    for batch in in_batches(_wider_first(MIXED.items()), most):
        arrived |= _moved(batch, torch.device("cpu"))
    assert arrived.keys() == MIXED.keys()
    assert all(
        torch.equal(arrived[name], value) and arrived[name].dtype == value.dtype for name, value in MIXED.items()
    )


def test_only_what_is_large_leaves_the_host() -> None:
    values = {"small": torch.ones(LARGE - 1), "large": torch.ones(LARGE)}
    assert {name: value.device.type for name, value in near(values, torch.device("meta")).items()} == {
        "small": "cpu",
        "large": "meta",
    }
    assert read({name: value[:2] for name, value in values.items()}) == {"small": [1.0, 1.0], "large": [1.0, 1.0]}


class Readings(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Counts how often a number is read, for which a device is waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("judge", [compare_all, compare_running_on])
def test_results_that_differ_are_read_once(judge: Callable[[Pairs, int, Tolerance], Mapping[Any, Any]]) -> None:
    eager = torch.randn(LARGE)
    pairs = {("output", str(number)): (eager * 1.001, Oracle(eager, eager.double(), 1.0)) for number in range(8)}
    with Readings() as readings:
        found = judge(pairs, 0, Tolerance())
    assert len(found) == 8
    assert readings.count == 0, "all are read as one list"


def test_results_of_several_types_move_in_one_piece() -> None:
    assert [len(batch) for batch in in_batches(_wider_first(MIXED.items()), 1 << 20)] == [len(MIXED)]
