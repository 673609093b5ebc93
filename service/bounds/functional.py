"""Traces torch's own functional collectives as the same operators as those of our layers.

Torch writes a gather along any dimension but the first as one along the batch, which a traced graph could not
distinguish from mixing instances. So while a model is traced, the code of these functions is replaced, which works
under any name and in any closure of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from service.parallel import collectives
from service.torch_internals.table import internal


def total(x: Tensor, operation: str, group: Any, tag: str) -> Tensor:
    name, size = _group(group, tag)
    found = collectives.reduce_from_group(x, name)
    return found / size if _averages(operation) else found


def gathered(x: Tensor, dim: int, group: Any, tag: str) -> Tensor:
    return collectives.gather_from_group(x, dim, *_group(group, tag))


def scattered(x: Tensor, operation: str, dim: int, group: Any, tag: str) -> Tensor:
    name, size = _group(group, tag)
    own = collectives.reduce_scatter_to_group(x, dim, name, size)
    return own / size if _averages(operation) else own


def _group(group: Any, tag: str) -> tuple[str, int]:
    """Return the name of a group and its number of ranks."""
    name = str(internal("torch.distributed._functional_collectives._resolve_group_name")(group, tag))
    return name, collectives.resolve(name).size()


def _averages(operation: str) -> bool:
    if operation.lower() not in {"sum", "avg"}:
        raise ValueError(f"a collective with {operation!r} cannot be bounded; expected 'sum' or 'avg'")
    return operation.lower() == "avg"


# These run in torch's module, under the names of the functions there: they have to import what they use.
def _all_reduce(self: Tensor, reduceOp: str, group: Any, tag: str = "") -> Tensor:  # noqa: N803 - torch's name
    from service.bounds.functional import total  # noqa: PLC0415

    return total(self, reduceOp, group, tag)


def _all_gather(self: Tensor, gather_dim: int, group: Any, tag: str = "") -> Tensor:
    from service.bounds.functional import gathered  # noqa: PLC0415

    return gathered(self, gather_dim, group, tag)


def _reduce_scatter(self: Tensor, reduceOp: str, scatter_dim: int, group: Any, tag: str = "") -> Tensor:  # noqa: N803
    from service.bounds.functional import scattered  # noqa: PLC0415

    return scattered(self, reduceOp, scatter_dim, group, tag)


_OURS: Mapping[str, Callable[..., Tensor]] = {
    "all_reduce": _all_reduce,
    # torch 2.13 renamed those of one tensor; 2.11 has the older names only.
    **dict.fromkeys(("all_gather_single", "all_gather_tensor"), _all_gather),
    **dict.fromkeys(("all_gather_single_autograd", "all_gather_tensor_autograd"), _all_gather),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor"), _reduce_scatter),
    **dict.fromkeys(("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"), _reduce_scatter),
}


@contextmanager
def recognised() -> Iterator[None]:
    """While this holds, functional collectives leave operators with rules in a trace. Without a started group it
    changes nothing.
    """
    started = dist.is_available() and dist.is_initialized()
    functional = internal("torch.distributed._functional_collectives") if started else None
    theirs = {name: getattr(functional, name) for name in _OURS if hasattr(functional, name)}
    codes = {name: function.__code__ for name, function in theirs.items()}
    try:
        for name, function in theirs.items():
            function.__code__ = _OURS[name].__code__
        yield
    finally:
        for name, function in theirs.items():
            function.__code__ = codes[name]
