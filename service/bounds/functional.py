"""Traces torch's own collectives as the same operators as those of our layers: the functional ones, those of
``torch.distributed.nn``, and those of ``torch.distributed`` that write in place.

Torch writes a gather along any dimension but the first as one along the batch, which a traced graph could not
distinguish from mixing instances. So while a model is traced, the code of these functions is replaced, which works
under any name and in any closure of a model. What has no rule is refused with what to write instead; it would reach
other ranks, which do not wait for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from service.bounds.graph import UnsupportedModelError
from service.parallel import collectives
from service.torch_internals.table import internal

_BATCH = (
    "it joins or cuts dimension 0, the instances of a batch; write the functional all_gather or reduce_scatter with "
    "another dimension, or all_gather, reduce_scatter or all_to_all with lists of tensors"
)
_EVERYWHERE = "not every rank gets a result; write all_reduce, all_gather or broadcast, and use this rank's part of it"
_MESSAGE = "messages between two ranks are not collectives; write broadcast, or all_gather and this rank's part of it"
_OBJECTS = "it exchanges objects; do that when the model is built"


def _all_reduce(self: Tensor, reduceOp: str, group: Any, tag: str = "") -> Tensor:  # noqa: N803 - torch's name
    name, size = _group(group, tag)
    found = collectives.reduce_from_group(self, name)
    return found / size if _averages(reduceOp) else found


def _all_reduce_coalesced(self: Sequence[Tensor], reduceOp: str, group: Any, tag: str = "") -> list[Tensor]:  # noqa: N803
    return [_all_reduce(each, reduceOp, group, tag) for each in self]


def _all_gather(self: Tensor, gather_dim: int, group: Any, tag: str = "") -> Tensor:
    return collectives.gather_from_group(self, gather_dim, *_group(group, tag))


def _reduce_scatter(self: Tensor, reduceOp: str, scatter_dim: int, group: Any, tag: str = "") -> Tensor:  # noqa: N803
    name, size = _group(group, tag)
    own = collectives.reduce_scatter_to_group(self, scatter_dim, name, size)
    return own / size if _averages(reduceOp) else own


def _broadcast(self: Tensor, src: int, group: Any, tag: str = "") -> Tensor:
    """Return the part of rank ``src`` of the group from all parts side by side."""
    return _parts(self, group, tag)[src]


def _parts(x: Tensor, group: Any, tag: str = "") -> tuple[Tensor, ...]:
    return _all_gather(x.unsqueeze(1), 1, group, tag).unbind(1)


def _all_reduce_of_nn(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Tensor:
    return _all_reduce(tensor, _named(op), group)


def _broadcast_of_nn(tensor: Tensor, src: int, group: Any = None) -> Tensor:
    return _broadcast(tensor, _rank_in(group, src), group)


def _all_gather_of_nn(tensor: Tensor, group: Any = None) -> tuple[Tensor, ...]:
    return _parts(tensor, group)


def _reduce_scatter_of_nn(
    output: Tensor, input_list: Sequence[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None
) -> Tensor:
    return _reduce_scatter(torch.stack(tuple(input_list), 1), _named(op), 1, group).squeeze(1)


def _all_to_all_of_nn(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Any = None
) -> tuple[Tensor, ...]:
    """Return from each rank what it has for this one, out of what all ranks have for all."""
    own = _rank_in(group, dist.get_rank())
    return tuple(each[:, own] for each in _parts(torch.stack(tuple(input_tensor_list), 1), group))


def _all_reduce_in_place(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    _check_waits(async_op)
    tensor.copy_(_all_reduce_of_nn(tensor, op, group))


def _broadcast_in_place(
    tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
) -> None:
    _check_waits(async_op)
    if src is not None:
        group_src = _rank_in(group, src)
    elif group_src is None:
        raise UnsupportedModelError("broadcast without src or group_src; expected the rank whose tensor all get")
    tensor.copy_(_broadcast(tensor, group_src, group))


def _all_gather_in_place(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> None:
    _check_waits(async_op)
    for place, found in zip(tensor_list, _parts(tensor, group), strict=True):
        place.copy_(found)


def _reduce_scatter_in_place(
    output: Tensor, input_list: Sequence[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    _check_waits(async_op)
    output.copy_(_reduce_scatter_of_nn(output, input_list, op, group))


def _all_to_all_in_place(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> None:
    _check_waits(async_op)
    for place, found in zip(output_tensor_list, _all_to_all_of_nn((), input_tensor_list, group), strict=True):
        place.copy_(found)


def _check_waits(async_op: bool) -> None:
    if async_op:
        raise UnsupportedModelError("a collective with async_op=True cannot be bounded; expected False")


def _group(group: Any, tag: str) -> tuple[str, int]:
    """Return the name of a group and its number of ranks; ``None`` is the group of all."""
    resolve = internal("torch.distributed._functional_collectives._resolve_group_name")
    name = str(resolve(dist.group.WORLD if group is None else group, tag))
    return name, collectives.resolve(name).size()


def _rank_in(group: Any, rank: int) -> int:
    """Return the place of a global rank in a group."""
    return rank if group is None else dist.get_group_rank(group, rank)


def _named(op: Any) -> str:
    known = (name for name in ("sum", "avg") if op == getattr(dist.ReduceOp, name.upper()))
    return next(known, str(op).rpartition(".")[2].lower())


def _averages(operation: str) -> bool:
    if operation.lower() not in {"sum", "avg"}:
        raise ValueError(f"a collective with {operation!r} cannot be bounded; expected 'sum' or 'avg'")
    return operation.lower() == "avg"


_FUNCTIONAL: Mapping[str, Callable[..., Any] | str] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "broadcast": _broadcast,
    # torch 2.13 renamed those of one tensor; 2.11 has the older names only.
    **dict.fromkeys(("all_gather_single", "all_gather_tensor"), _all_gather),
    **dict.fromkeys(("all_gather_single_autograd", "all_gather_tensor_autograd"), _all_gather),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor"), _reduce_scatter),
    **dict.fromkeys(("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"), _reduce_scatter),
    **dict.fromkeys(("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"), _BATCH),
    **dict.fromkeys(("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), _BATCH),
    **dict.fromkeys(("all_to_all_single", "all_to_all_single_autograd"), _BATCH),
    "permute_tensor": _MESSAGE,
}
_OF_NN: Mapping[str, Callable[..., Any] | str] = {
    "all_reduce": _all_reduce_of_nn,
    "broadcast": _broadcast_of_nn,
    "all_gather": _all_gather_of_nn,
    "reduce_scatter": _reduce_scatter_of_nn,
    "all_to_all": _all_to_all_of_nn,
    **dict.fromkeys(("_all_gather_base", "all_to_all_single"), _BATCH),
    **dict.fromkeys(("reduce", "gather", "scatter"), _EVERYWHERE),
}
_IN_PLACE: Mapping[str, Callable[..., Any] | str] = {
    "all_reduce": _all_reduce_in_place,
    "broadcast": _broadcast_in_place,
    "all_gather": _all_gather_in_place,
    "reduce_scatter": _reduce_scatter_in_place,
    "all_to_all": _all_to_all_in_place,
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor"), _BATCH),
    **dict.fromkeys(("reduce_scatter_single", "all_to_all_single", "all_gather_coalesced"), _BATCH),
    **dict.fromkeys(("reduce", "gather", "scatter"), _EVERYWHERE),
    **dict.fromkeys(("barrier", "monitored_barrier"), "ranks wait for each other in the bounds; leave it out"),
    "all_reduce_coalesced": "write an all_reduce for each tensor",
    **dict.fromkeys(("send", "recv", "isend", "irecv", "batch_isend_irecv"), _MESSAGE),
    **dict.fromkeys(("broadcast_object_list", "all_gather_object", "scatter_object_list", "gather_object"), _OBJECTS),
}
"""What stands for the functions of each of torch's modules while a model is traced, or what to write instead."""


_NN = "torch.distributed.nn.functional"


def call(name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Make a call of one of torch's functions, ``module.function``, by its rule."""
    where, _, function = name.rpartition(".")
    rule = _modules()[where][1][function]
    if isinstance(rule, str):
        raise UnsupportedModelError(f"{where}.{function} cannot be bounded: {rule}")
    return rule(*arguments, **named)


def _modules() -> Mapping[str, tuple[Any, Mapping[str, Callable[..., Any] | str]]]:
    functional = "torch.distributed._functional_collectives"
    return {
        functional: (internal(functional), _FUNCTIONAL),
        _NN: (sys.modules.get(_NN), _OF_NN),  # a model that uses it has imported it
        "torch.distributed": (dist, _IN_PLACE),
    }


def _stand_in(*arguments: Any, **named: Any) -> Any:
    # This runs in torch's modules, in place of their functions: it has to import what it uses.
    import sys  # noqa: PLC0415

    from service.bounds.functional import call  # noqa: PLC0415

    return call(sys._getframe().f_code.co_name, arguments, named)


@contextmanager
def recognised() -> Iterator[None]:
    """Let torch's collectives leave operators with rules in a trace meanwhile. Without a started group it changes
    nothing.
    """
    started = dist.is_available() and dist.is_initialized()
    theirs: dict[str, FunctionType] = {}
    for where, (module, rules) in _modules().items() if started else ():
        for name in rules:
            function = inspect.unwrap(getattr(module, name, _stand_in))  # some are within a function that logs errors
            if function is not _stand_in and all(function is not each for each in theirs.values()):
                theirs[f"{where}.{name}"] = function
    codes = {name: function.__code__ for name, function in theirs.items()}
    try:
        for name, function in theirs.items():
            function.__code__ = _stand_in.__code__.replace(co_name=name)
        yield
    finally:
        for name, function in theirs.items():
            function.__code__ = codes[name]
