"""Divides a model of the package transformers over tensor-parallel ranks, as its own plan says.

A plan has a kind for each layer by name (``model.layers.*.self_attn.q_proj: colwise``). Layers of ours take the place
of linear ones, with this rank's part of what the constructor drew. What the plan does not name is whole on each rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from service.jobs.spec.families.huggingface import HEADS, drop_rates
from service.models.packaged.base import PackagedError
from service.parallel.collectives import copy_to_group, reduce_from_group
from service.parallel.mesh import Axis
from service.parallel.tensor import ColumnParallelLinear, RowParallelLinear, local, localize_ids
from service.parallel.tensor.placement import divided

_LINEAR: Mapping[str, tuple[Any, Mapping[str, bool]]] = {
    "colwise": (ColumnParallelLinear, {}),
    "colwise_gather_output": (ColumnParallelLinear, {"gather_output": True}),
    "colwise_rep": (ColumnParallelLinear, {"gather_output": True}),
    "rowwise": (RowParallelLinear, {}),
    "rowwise_split_input": (RowParallelLinear, {"scatter_input": True}),
    "rowwise_rep": (RowParallelLinear, {"scatter_input": True}),
}
_EMBEDDING, _SUMMED = "embedding_rowwise", "replicated_with_grad_allreduce"
"""A table of rows, and a layer whole on every rank that applies it to its own heads."""
_KINDS = (*_LINEAR, _EMBEDDING, _SUMMED)
_OF_HEADS = re.compile(r"(q|k|v|qkv)_proj|query_key_value")
"""Layers whose outputs are heads."""
Parts = dict[int, nn.Parameter]
"""This rank's part of each parameter, by the whole one's id: one for all layers that share it."""


def divide(network: Any, axis: Axis) -> frozenset[str]:
    """Divide a network in place; return the names of the parameters whose gradients are summed over the ranks.

    Raises :class:`PackagedError` naming what its plan has no rule of ours for, or what does not divide.
    """
    kinds = _placed(network)
    _check_sizes(network.config, kinds, axis)
    _check_neighbours(network, kinds)
    parts: Parts = {}
    for name, kind in kinds.items():
        module = network.get_submodule(name)
        try:
            if kind in _LINEAR:
                network.set_submodule(name, _divided_linear(module, kind, axis, parts))
            elif kind == _EMBEDDING:
                _divide_table(module, axis, parts)
        except ValueError as error:
            raise PackagedError(f"model.config: {network.config.model_type}: {name} ({kind}): {error}") from error
    summed = {name for name, kind in kinds.items() if kind == _SUMMED}
    return frozenset(name for name, _ in network.named_parameters() if name.rpartition(".")[0] in summed)


def own_parameters(network: nn.Module, summed: frozenset[str], axis: Axis) -> dict[str, Tensor]:
    """Return this rank's parts of the parameters, for a forward."""
    own = {}
    for name, parameter in network.named_parameters():  # in one order on all ranks, which meet in the sums
        own[name] = copy_to_group(local(parameter), axis.group) if name in summed else local(parameter)
    return own


def _placed(network: Any) -> dict[str, str]:
    """Return the kind of each module that the plan names."""
    model_type, plan = network.config.model_type, getattr(network, "tp_plan", None)
    if not plan:
        raise PackagedError(f"parallel.tp: {model_type} has no tensor-parallel plan; expected 1")
    modules = {name: _pattern(name) for name, _ in network.named_modules()}
    present = {*modules.values(), *(_pattern(name) for name, _ in network.named_parameters())}
    for name, kind in plan.items():
        if name in present and (kind not in _KINDS or name not in modules.values()):
            raise PackagedError(
                f"parallel.tp: the plan of {model_type} has {name!r} as {kind!r}, which has no rule here; expected "
                f"1, or an architecture whose layers are {', '.join(_KINDS)}"
            )
    kinds = {name: plan[pattern] for name, pattern in modules.items() if pattern in plan}
    return {name: kind for name, kind in kinds.items() if name not in set(_unlike(network, kinds))}


def _pattern(name: str) -> str:
    """Return a name as plans write it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _unlike(network: nn.Module, kinds: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules that share a parameter which the plan divides in one place alone: it is whole in both."""
    places = defaultdict(list)
    for name, module in network.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((name, _dimension(kinds.get(name), leaf)))
    for shared in places.values():
        if len({dimension for _, dimension in shared}) > 1:
            yield from (name for name, _ in shared)


def _dimension(kind: str | None, leaf: str) -> int | None:
    if kind is not None and kind in _LINEAR:
        found: int | None = _LINEAR[kind][0].sharded.get(leaf)
        return found
    return 0 if kind == _EMBEDDING else None


def _check_sizes(config: Any, kinds: Mapping[str, str], axis: Axis) -> None:
    if any(kind == "colwise" and _OF_HEADS.fullmatch(name.rpartition(".")[2]) for name, kind in kinds.items()):
        for field in HEADS:
            heads = getattr(config, field, None)
            if isinstance(heads, int) and heads % axis.size:
                raise PackagedError(
                    f"model.config.{field}: {heads} does not divide by tp={axis.size}; expected a multiple of it"
                )
    for field, rate in drop_rates(config.to_dict()).items():
        raise PackagedError(f"model.config.{field}: {rate} draws apart on each tensor-parallel rank; expected 0")


def _check_neighbours(network: nn.Module, kinds: Mapping[str, str]) -> None:
    """Raise :class:`PackagedError` for a parameter among divided layers that the plan does not name: each rank would
    use it for its own part, and its gradient would be a part, too.
    """
    blocks = {name.rpartition(".")[0] for name, kind in kinds.items() if kind == "colwise"}
    for name, _ in network.named_parameters():
        owner = name.rpartition(".")[0]
        if owner not in kinds and any(owner == block or owner.startswith(f"{block}.") for block in blocks):
            raise PackagedError(
                f"parallel.tp: {name!r} lies among divided layers, and the plan has no kind for it; expected 1, or a "
                "configuration without it"
            )


def _part(parameter: nn.Parameter, dimension: int | None, axis: Axis, parts: Parts) -> nn.Parameter:
    if id(parameter) not in parts:
        own = parameter.detach()
        if dimension is not None:
            own = own.chunk(axis.size, dimension)[axis.rank].clone(memory_format=torch.contiguous_format)
        parts[id(parameter)] = nn.Parameter(own, requires_grad=parameter.requires_grad)
    return parts[id(parameter)]


def _divided_linear(module: nn.Module, kind: str, axis: Axis, parts: Parts) -> nn.Module:
    if type(module) is not nn.Linear:
        raise ValueError(f"a {type(module).__name__}; expected nn.Linear")
    make, options = _LINEAR[kind]
    with torch.device("meta"):
        layer: nn.Module = make(module.in_features, module.out_features, axis, bias=module.bias is not None, **options)
    for leaf, parameter in module.named_parameters(recurse=False):
        setattr(layer, leaf, _part(parameter, _dimension(kind, leaf), axis, parts))
    return layer


def _divide_table(module: Any, axis: Axis, parts: Parts) -> None:
    """Leave this rank's rows; others' ids give zeros, which the sum over the ranks fills."""
    rows, padding = divided(module.num_embeddings, axis, "num_embeddings"), module.padding_idx
    module.weight = _part(module.weight, 0, axis, parts)
    module.first, module.axis, module.sharded = axis.rank * rows, axis, {"weight": 0}
    if padding is not None:
        module.padding_idx = padding - module.first if 0 <= padding - module.first < rows else None
    module.__class__ = _table_of(type(module))


def _table_of(kind: Any) -> Any:
    class Rows(kind):  # type: ignore[misc]
        def forward(self, ids: Tensor) -> Tensor:
            own, is_own = localize_ids(ids, self.first, len(self.weight))
            rows = super().forward(own).masked_fill(~is_own.unsqueeze(-1), 0)
            return reduce_from_group(rows, self.axis.group)

    Rows.__name__ = Rows.__qualname__ = f"RowsOf{kind.__name__}"
    return Rows
