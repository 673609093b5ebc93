"""Makes a model of a module that was not written for it: one block, whole on each rank unless its builder divides it.

Its constructor runs on the CPU, from the same seed on every rank. What it makes is kept: values of its weights, weights
that two layers share, rows that stay zero, constants. Buffers that its state dict holds, such as running statistics,
are part of the model: checkpoints hold them, and data-parallel ranks have the same. What checkpoints would lose is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from service.jobs.plugins import ModelConfig
from service.models.held_state import attributes, check_attributes, lost
from service.models.initialize import Distribution, draw, key_of
from service.models.randomness import seeded
from service.parallel.mesh import SINGLE
from service.parallel.tensor.placement import check_replaceable, global_tensors, state_buffers, tied_names

PLAIN = "blocks.0."
"""The beginning of the module's names of tensors in the model that is made of it."""


class _Drawn(Protocol):
    def distribution(self, name: str) -> Distribution:
        """Return the distribution of the parameter of this name."""


class PlainModel(nn.Module):
    """The module as the only block of a chain, with what checkpoints hold of it in ``dtype``."""

    before_blocks: tuple[str, ...] = ()
    after_blocks: tuple[str, ...] = ()
    output_axis = SINGLE

    def __init__(self, config: ModelConfig, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleDict({"0": network})
        self.kind = type(network).__name__
        for _, tensor in global_tensors(self):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks["0"](x)
        return found


def build_plain(
    config: ModelConfig,
    constructor: Callable[[], nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> PlainModel:
    """Return the model of the module that ``constructor`` makes, on ``device`` in ``dtype``.

    If the module has ``distribution(name)``, its weights are drawn from that. Raises ``ValueError`` with the name of
    what neither ranks nor checkpoints would have in common.
    """
    network = _constructed(constructor, seed)
    _check_state(network)
    if constants := dict(_constants(network)):
        other = dict(_constants(_constructed(constructor, seed + 1)))
        for name, value in constants.items():
            if name not in other or not _same(value, other[name]):
                advice = "which checkpoints do not hold; nn.Parameter(…, requires_grad=False) would be in them"
                raise lost(type(network).__name__, name, f"a tensor that its constructor draws, {advice}")
    if hasattr(network, "distribution"):
        _draw(network, cast(_Drawn, network).distribution, seed)
    for name, value in list(_tensors_of(network)):
        owner, _, leaf = name.rpartition(".")
        delattr(module := network.get_submodule(owner), leaf)
        module.register_buffer(leaf, value, persistent=False)  # which goes where the parameters go
    return PlainModel(config, network, dtype).to(device)


def _constructed(constructor: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.device("cpu"), seeded(seed, "weights"):
        return constructor()


@torch.no_grad()
def _draw(network: nn.Module, distribution: Callable[[str], Distribution], seed: int) -> None:
    for name, parameter in network.named_parameters():
        key, shape = key_of(seed, f"blocks.0.{name}"), tuple(parameter.shape)
        drawn = draw(distribution(name), key, shape, None, SINGLE, dtype=parameter.dtype, device=parameter.device)
        parameter.copy_(drawn)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _check_state(network: nn.Module) -> None:
    """Raise ``ValueError`` for state beside parameters and buffers, which checkpoints would not hold."""
    check_attributes(network)
    for name, value in attributes(network):
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if any(isinstance(each, Tensor) and not isinstance(each, nn.Parameter) for each in held):
            what = "a collection of tensors, which stay on the CPU; give each an attribute of its own"
            raise lost(type(network).__name__, name, what)


def check_planned(model: nn.Module, *, is_cut: bool) -> None:
    """Raise ``ValueError`` for a tensor of a model planned on the meta device that would never get its values, for a
    parameter that is divided already or would get two weights, and for what the weights that take the place of the
    planned ones would leave behind.
    """
    kind = type(model).__name__
    if spread := [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]:
        raise ValueError(
            f"{kind} has a DTensor, {spread[0]!r}; expected this rank's part as a plain parameter, "
            "whose divided dimension its layer names in `sharded`, as ColumnParallelLinear and RowParallelLinear do"
        )
    for name, value in (*model.named_buffers(), *_tensors_of(model)):
        if value.is_meta:
            raise ValueError(
                f"{kind} has a tensor that is no parameter, {name!r}, and is planned on the meta "
                'device: only its parameters get values; make it in forward, or under torch.device("cpu")'
            )
    check_replaceable(model, f"the weights of {kind}, which is planned on the meta device,")
    check_attributes(model)
    _check_ties(model, is_cut=is_cut)


def _check_ties(model: nn.Module, *, is_cut: bool) -> None:
    """Raise ``ValueError`` for a parameter of a planned model in two places, which ``tied`` does not name: each would
    get weights of its own. A module in two places is one, unless a pipeline may cut the model between them.
    """
    names, first = tied_names(model), dict[int, tuple[str, nn.Module]]()
    if chained := [second for second, known in names.items() if known in names]:
        raise ValueError(
            f"{type(model).__name__}.tied names {names[chained[0]]!r} for {chained[0]!r}, which is a second place "
            f"itself; expected the first place, {names[names[chained[0]]]!r}"
        )
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(prefix, recurse=False):
            known, owner = first.setdefault(id(parameter), (leaf, module))
            is_one = owner is module and (not is_cut or _unit(known) == _unit(leaf))
            if is_one or leaf in names:
                continue
            ends = getattr(model, "before_blocks", ()), getattr(model, "after_blocks", ())
            can_tie = not is_cut or (_unit(known) in ends[0] and _unit(leaf) in ends[1])
            tied = f"expected tied = {{{leaf!r}: {known!r}}} as an attribute, which makes them one"
            raise ValueError(
                f"{type(model).__name__} has one parameter as {known!r} and as {leaf!r}, each of which would get "
                f"weights of its own; {tied if can_tie else 'only the ends of a pipeline can share one'}"
            )


def _unit(name: str) -> str:
    """Return the part of a chain, which no pipeline cuts, in which a parameter is."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def _constants(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors beside the parameters that no state dict holds, by name."""
    state = {id(value) for _, value in state_buffers(network)}
    yield from ((name, value) for name, value in network.named_buffers() if id(value) not in state)
    yield from _tensors_of(network)


def _tensors_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are plain attributes, by name."""
    for name, value in attributes(network):
        if isinstance(value, Tensor):
            yield name, value
