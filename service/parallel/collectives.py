"""Collectives as operators: ordinary nodes ``torch.ops.trivet.*`` in a traced graph, with gradients.

A group is named by a string and resolved only inside the kernel that runs; where a result's shape depends on the
number of ranks, that number is an argument. So tracing, export and ``torch.compile`` need no process group. An empty
group name is a group of one: every function is then the identity and leaves no node.

The pairs are those of Megatron-LM (Shoeybi et al., 2019; sequence parallelism: Korthikanti et al., 2022). Gradients
assume that ranks of a group hold the same loss, each computed once.

=============================== =================== ====================
function                        forward             gradient
=============================== =================== ====================
copy_to_group ("f")             identity            all-reduce
reduce_from_group ("g")         all-reduce          identity
gather_from_group               all-gather          own slice
scatter_to_group                own slice           all-gather
reduce_scatter_to_group         reduce-scatter      all-gather
gather_with_reduce_from_group   all-gather          reduce-scatter
max_over_group                  elementwise maximum none
=============================== =================== ====================

:func:`agree` compares values on which all ranks must agree before they wait for each other: a rank that differs would
never arrive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from service.jobs.text import shortened
from service.parallel.distributed import rank_and_size
from service.torch_internals.table import internal

# torch 2.13 renamed both; 2.11 has the older names only.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GroupError(RuntimeError):
    """A collective runs over a group that this process does not have, or a size does not divide."""


def resolve(group: str) -> dist.ProcessGroup:
    """Return the process group of that name; only kernels may call it."""
    resolved = internal("torch.distributed.distributed_c10d._resolve_process_group")
    try:
        return cast(dist.ProcessGroup, resolved(group))
    except (RuntimeError, KeyError, ValueError) as error:
        raise GroupError(f"no process group {group!r} in this process: was the mesh only planned?") from error


def _copy(x: Tensor, group: str) -> Tensor:
    # An operator may not return its input; the copy takes the place of x, which its producer then drops.
    return x.clone(memory_format=torch.contiguous_format)


def _sum(x: Tensor, group: str) -> Tensor:
    out = _copy(x, group)
    dist.all_reduce(out, group=resolve(group))
    return out


def _largest(x: Tensor, group: str) -> Tensor:
    out = _copy(x, group)
    dist.all_reduce(out, dist.ReduceOp.MAX, resolve(group))
    return out


def _part(length: int, size: int) -> int:
    if length % size:
        raise GroupError(f"a dimension of {length} does not divide among {size} ranks")
    return length // size


def _gather(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    dim %= x.dim()
    out = x.new_empty((size, *x.shape))
    _ALL_GATHER(out.view(-1), x.contiguous().view(-1), group=resolve(group))
    # A view along the first dimension; along others this is the one copy.
    return out.movedim(0, dim).flatten(dim, dim + 1)


def _slice(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    part = _part(x.shape[dim], size)
    start = dist.get_rank(resolve(group)) * part
    return x.narrow(dim, start, part).clone(memory_format=torch.contiguous_format)


def _reduce_scatter(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    dim %= x.dim()
    cut = x.reshape(*x.shape[:dim], size, _part(x.shape[dim], size), *x.shape[dim + 1 :])
    parts = cut.movedim(dim, 0).contiguous()
    out = parts.new_empty(parts.shape[1:])
    _REDUCE_SCATTER(out.view(-1), parts.view(-1), group=resolve(group))
    return out


def _resized(x: Tensor, dim: int, length: Any) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


def _define(name: str, function: Callable[..., Tensor]) -> Any:
    return torch.library.custom_op(f"trivet::{name}", function, mutates_args=())


_copy_to_group = _define("copy_to_group", _copy)
_reduce_from_group = _define("reduce_from_group", _sum)
_max_over_group = _define("max_over_group", _largest)
_gather_from_group = _define("gather_from_group", _gather)
_scatter_to_group = _define("scatter_to_group", _slice)
_reduce_scatter_to_group = _define("reduce_scatter_to_group", _reduce_scatter)
_gather_with_reduce_from_group = _define("gather_with_reduce_from_group", _gather)


def _same_shape(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _longer(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    return _resized(x, dim, x.shape[dim] * size)


def _shorter(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    return _resized(x, dim, x.shape[dim] // size)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _adjoint(operator: Any) -> Any:
    """Return a backward formula that applies ``operator`` with the forward call's own arguments."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return operator(gradient, *ctx.arguments), *(None for _ in ctx.arguments)

    return backward


def _identity_or_copy(gradient: Tensor, group: str) -> Tensor:
    """Return the adjoint of the all-reduce; a node of the graph only if a second derivative may go through it."""
    return _copy_to_group(gradient, group) if torch.is_grad_enabled() else gradient


for _operator, _fake, _backward in (
    (_copy_to_group, _same_shape, _reduce_from_group),
    (_reduce_from_group, _same_shape, _identity_or_copy),
    (_gather_from_group, _longer, _scatter_to_group),
    (_scatter_to_group, _shorter, _gather_from_group),
    (_reduce_scatter_to_group, _shorter, _gather_with_reduce_from_group),
    (_gather_with_reduce_from_group, _longer, _reduce_scatter_to_group),
):
    _operator.register_fake(_fake)
    _operator.register_autograd(_adjoint(_backward), setup_context=_remember)
_max_over_group.register_fake(_same_shape)


def copy_to_group(x: Tensor, group: str) -> Tensor:
    """Return ``x``, which is replicated, for work that differs by rank; the gradient is summed over the group."""
    return x if not group else _copy_to_group(x, group)


def reduce_from_group(x: Tensor, group: str) -> Tensor:
    """Return the sum of the ranks' partial values, replicated; each rank's gradient is that of the sum."""
    return x if not group else _reduce_from_group(x, group)


def max_over_group(x: Tensor, group: str) -> Tensor:
    """Return the elementwise maximum over the ranks; not differentiable."""
    return x if not group else _max_over_group(x, group)


def gather_from_group(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    """Return the ranks' shards joined along ``dim`` in rank order, replicated; the gradient is the own slice."""
    return x if not group else _gather_from_group(x, dim, group, size)


def scatter_to_group(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    """Return the own slice of a replicated ``x`` along ``dim``, which ``size`` divides; its gradient is gathered."""
    return x if not group else _scatter_to_group(x, dim, group, size)


def reduce_scatter_to_group(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    """Return the own slice along ``dim`` of the sum over the ranks; the gradient is gathered."""
    return x if not group else _reduce_scatter_to_group(x, dim, group, size)


def gather_with_reduce_from_group(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    """Join shards along ``dim`` for computations that differ by rank; the gradient is reduce-scattered."""
    return x if not group else _gather_with_reduce_from_group(x, dim, group, size)


_DIGEST_BYTES = 16
_LENGTH_BYTES = 8
_SHOWN = 200
"""The characters of a value that a message shows."""


class DisagreementError(RuntimeError):
    """Ranks have different values of the same name; all of them raise it, with the same message."""


def agree(values: Mapping[str, object]) -> None:
    """Raise :class:`DisagreementError` on every rank unless each gives the same ``values``, by name.

    Every rank of the job calls it at the same point. Values are compared as text. One exchange of a few bytes through
    the host, even if the ranks compute on CUDA: no device is waited for.
    """
    if rank_and_size()[1] == 1:
        return
    own = {name: str(value) for name, value in values.items()}
    digest = hashlib.blake2b(json.dumps(own).encode(), digest_size=_DIGEST_BYTES).digest()
    if len(set(_gathered(digest, _DIGEST_BYTES))) == 1:
        return
    text = json.dumps({name: shortened(value, _SHOWN) for name, value in own.items()}).encode()
    lengths = _gathered(len(text).to_bytes(_LENGTH_BYTES), _LENGTH_BYTES)
    texts = _gathered(text, max(map(int.from_bytes, lengths)))
    raise DisagreementError(_difference([json.loads(each.rstrip(b"\0")) for each in texts]))


def _gathered(own: bytes, length: int) -> list[bytes]:
    """Return the values of all ranks, padded with zeros to ``length``."""
    mine = torch.tensor(list(own.ljust(length, b"\0")), dtype=torch.uint8)
    found: list[Tensor] = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [bytes(each.tolist()) for each in found]


def _difference(by_rank: Sequence[Mapping[str, str]]) -> str:
    """Return the first difference, from which later ones follow."""
    for name in dict.fromkeys(name for values in by_rank for name in values):
        found = [values.get(name, "nothing") for values in by_rank]
        if len(set(found)) > 1:
            return f"the ranks disagree on {name}: {_by_value(found)}"
    return "the ranks disagree on a value that is too long to be shown"


def _by_value(values: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(f"{value} on rank {' and '.join(found)}" for value, found in ranks.items())
