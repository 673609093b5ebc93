"""Every tensor in a container is visited once, by its name, and replaced without touching what surrounds it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from service.parallel.containers import map_tensors, named_tensors, tensors_in

ONE, TWO = torch.ones(1), torch.full((1,), 2.0)
Pair = namedtuple("Pair", ("first", "second"))


@dataclass(frozen=True)
class Outputs:
    logits: Tensor
    cache: tuple[Tensor, ...] = ()
    label: str = "label"
    derived: int = field(init=False, default=3)


@dataclass(frozen=True)
class Setting:
    size: int = 1


CASES: list[tuple[Any, list[str]]] = [
    (ONE, ["x"]),
    ([ONE, (TWO, "text")], ["x.0", "x.1.0"]),
    ({"a": ONE, "b": {"c": TWO}}, ["x.a", "x.b.c"]),
    (OrderedDict(a=ONE), ["x.a"]),
    (MappingProxyType({"a": ONE}), ["x.a"]),
    (Pair(ONE, [TWO]), ["x.first", "x.second.0"]),
    (Outputs(ONE, (TWO,)), ["x.logits", "x.cache.0"]),
    ((Setting(), None, 4), []),
]


@pytest.mark.parametrize(("value", "names"), CASES)
def test_tensors_are_found_in_order(value: Any, names: list[str]) -> None:
    named = list(named_tensors("x", value))
    positional = [name.replace("first", "0").replace("second", "1") for name in names]
    assert [name for name, _ in named] == (positional if isinstance(value, Pair) else names)
    assert [id(tensor) for tensor in tensors_in(value)] == [id(tensor) for _, tensor in named]


@pytest.mark.parametrize(("value", "names"), CASES)
def test_tensors_are_replaced_in_their_place(value: Any, names: list[str]) -> None:
    doubled = map_tensors(value, lambda tensor: 2 * tensor)
    assert type(doubled) is (dict if isinstance(value, MappingProxyType) else type(value))
    before, after = list(tensors_in(value)), list(tensors_in(doubled))
    assert len(before) == len(after) == len(names)
    assert all(torch.equal(2 * old, new) for old, new in zip(before, after, strict=True))


def test_a_dataclass_without_tensors_stays_the_same() -> None:
    setting = Setting()
    assert map_tensors([setting], Tensor.clone)[0] is setting
