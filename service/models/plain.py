"""Makes a model of a module that was not written for it: one block, whole on each rank unless its builder divides it.

Its constructor runs on the CPU, from the same seed on every rank. What it makes is kept: values of its weights, weights
that two layers share, rows that stay zero, constants. Buffers that its state dict holds, such as running statistics,
are part of the model: checkpoints hold them, and data-parallel ranks have the same. What checkpoints would lose is
refused.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from service.jobs.plugins import ModelConfig
from service.models.initialize import Distribution, draw, key_of
from service.models.randomness import seeded
from service.parallel.collectives import agree
from service.parallel.mesh import SINGLE
from service.parallel.tensor.placement import state_buffers

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
PLAIN = "blocks.0."
"""The beginning of the module's names of tensors in the model that is made of it."""
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class _Drawn(Protocol):
    def distribution(self, name: str) -> Distribution:
        """Return the distribution of the parameter of this name."""


class PlainModel(nn.Module):
    """The module as the only block of a chain."""

    before_blocks: tuple[str, ...] = ()
    after_blocks: tuple[str, ...] = ()
    output_axis = SINGLE

    def __init__(self, config: ModelConfig, network: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleDict({"0": network})
        self.constants = {
            name: value.detach().cpu().clone() for name, value in _constants(network) if not value.is_meta
        }
        self.numbers = deepcopy(dict(_numbers(network)))
        self.kind = type(network).__name__

    def check_state(self) -> None:
        """Raise ``ValueError`` for a tensor or a number that no state dict holds and training has changed: a resumed
        run would begin with the constructor's. Raise :class:`DisagreementError` for a buffer that is not the same on
        all ranks, which all call it.
        """
        for name, value in _constants(self.blocks["0"]):
            if not _same(value.cpu(), self.constants[name]):
                raise _lost(self.kind, name, "a tensor that forward changes, which checkpoints do not hold")
        for name, number in _numbers(self.blocks["0"]):  # what forward has set first may be a size, which stays
            if repr(number) != repr(self.numbers.setdefault(name, deepcopy(number))):
                what = "a number that forward changes, which checkpoints do not hold; register_buffer makes it one"
                raise _lost(self.kind, name, what)
        agree({f"the buffer {name!r}": _digest(value) for name, value in state_buffers(self)})

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks["0"](x)
        return found


def build_plain(
    config: ModelConfig, constructor: Callable[[], nn.Module], *, device: torch.device, seed: int
) -> PlainModel:
    """Return the model of the module that ``constructor`` makes, on ``device``.

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
                raise _lost(type(network).__name__, name, f"a tensor that its constructor draws, {advice}")
    if hasattr(network, "distribution"):
        _draw(network, cast(_Drawn, network).distribution, seed)
    for name, value in list(_tensors_of(network)):
        owner, _, leaf = name.rpartition(".")
        delattr(module := network.get_submodule(owner), leaf)
        module.register_buffer(leaf, value, persistent=False)  # which goes where the parameters go
    return PlainModel(config, network).to(device)


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


def _digest(value: Tensor) -> str:
    return hashlib.sha256(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _lost(kind: str, name: str, what: str) -> ValueError:
    return ValueError(f"the attribute {name!r} of {kind} is {what}")


def _check_state(network: nn.Module) -> None:
    """Raise ``ValueError`` for state beside parameters and buffers, which checkpoints would not hold."""
    kind = type(network).__name__
    for name, module in network.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(f"{name or kind} has get_extra_state: checkpoints hold tensors alone")
    for name, value in _attributes(network):
        if isinstance(value, _GENERATORS):
            raise _lost(kind, name, "a generator of random numbers, which a resumed run would begin anew")
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if any(isinstance(each, Tensor) and not isinstance(each, nn.Parameter) for each in held):
            raise _lost(kind, name, "a collection of tensors, which stay on the CPU; give each an attribute of its own")


def check_planned(model: nn.Module) -> None:
    """Raise ``ValueError`` for a tensor of a model planned on the meta device that would never get its values, and for
    a parameter that is divided already.
    """
    if spread := [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]:
        raise ValueError(
            f"{type(model).__name__} has a DTensor, {spread[0]!r}; expected this rank's part as a plain parameter, "
            "whose divided dimension its layer names in `sharded`, as ColumnParallelLinear and RowParallelLinear do"
        )
    for name, value in (*model.named_buffers(), *_tensors_of(model)):
        if value.is_meta:
            raise ValueError(
                f"{type(model).__name__} has a tensor that is no parameter, {name!r}, and is planned on the meta "
                'device: only its parameters get values; make it in forward, or under torch.device("cpu")'
            )


def _constants(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors beside the parameters that no state dict holds, by name."""
    state = {id(value) for _, value in state_buffers(network)}
    yield from ((name, value) for name, value in network.named_buffers() if id(value) not in state)
    yield from _tensors_of(network)


def _tensors_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are plain attributes, by name."""
    for name, value in _attributes(network):
        if isinstance(value, Tensor):
            yield name, value


def _numbers(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the numbers that are plain attributes, and the collections of numbers, by name."""
    yield from ((name, value) for name, value in _attributes(network) if _is_number(value))


def _is_number(value: object) -> bool:
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_number, value))
    if isinstance(value, dict):
        return all(map(_is_number, value.values()))
    return isinstance(value, int | float | complex | np.number)


def _attributes(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the modules' own code has set beside parameters, buffers and modules, by qualified name."""
    for prefix, module in network.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                yield f"{prefix}.{name}" if prefix else name, value
