"""State beside a model's state dict: what may be set once, what may not change, and modes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from service.models.held_state import HeldState
from service.models.modes import modes_kept
from service.models.parallelize import apply_activation_checkpoint


class Average:
    """An object of the model's own package."""

    def __init__(self) -> None:
        self.value, self.itself = 0.0, self


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.average, self.table, self.last = Average(), dict[int, Any](), None
        self.names, self.points, self.sparse = ["a"], np.zeros(2), torch.eye(2).to_sparse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda held: setattr(held.average, "value", 1.0), r"'average\.value' of Holding is a number"),
        (lambda held: held.names.append("b"), "'names' of Holding is a collection"),
        (lambda held: held.points.__setitem__(0, 1), "'points' of Holding is an array"),
        (lambda held: held.table.__setitem__(4, held.table[4] + 1), r"'table\[4\]' of Holding is a tensor"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_changes_is_named_and_what_is_set_once_may_stay(
    change: Callable[[Any], Any], name: str, wrapped: bool
) -> None:
    held = Holding()
    if wrapped:  # by a class of another package
        apply_activation_checkpoint(cast(Any, SimpleNamespace(blocks={"0": held})), "full")
    state = HeldState.of_model(held, "Holding")
    for length in (4, 8):
        held.table[length] = torch.ones(length)
        state.check()
    change(held)
    with pytest.raises(ValueError, match=f"attribute {name} that forward changes"):
        state.check()


class Merging(nn.Linear):
    """Does more than set the mode, as an adapter does that is merged into its weight for an evaluation."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def test_modes_are_kept_by_a_train_of_ones_own_and_by_parts_at_rest() -> None:
    model = nn.Sequential(Merging(1, 1), nn.Dropout().eval())
    with modes_kept([model]):
        model.eval()
    assert [part.training for part in model] == [True, False]
    assert not cast(Merging, model[0]).merged
