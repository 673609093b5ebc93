"""Defines what an optimizer is made of; a package with its own returns :class:`Rule` s from its factory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from service.models.held_state import lost

_COUNT = "step"


@dataclass(frozen=True)
class UpdateGroup:
    """Parameters of this rank that are updated alike, with their peak rate and weight decay.

    ``parameters`` are named as in every layout. A tied one may be there twice under one name, since a rank may have
    both of its places. ``rows`` has by name the rows before the padding of padded ones. ``decay_given`` says that a
    group of the spec gives the decay.
    """

    parameters: Sequence[tuple[str, nn.Parameter]]
    lr: float
    weight_decay: float
    decay_given: bool = False
    rows: Mapping[str, int] = field(default_factory=dict)

    def of_torch(self) -> dict[str, Any]:
        """Return it as a group of ``torch.optim``; its ``peak`` is what the schedule scales."""
        values = [parameter for _, parameter in self.parameters]
        return {"params": values, "lr": self.lr, "peak": self.lr, "weight_decay": self.weight_decay}

    def split(self, chosen: Callable[[str, Tensor], bool]) -> tuple[UpdateGroup, UpdateGroup]:
        """Return the group of the chosen parameters and that of the rest, either of which may be empty."""
        picked = [pair for pair in self.parameters if chosen(*pair)]
        rest = [pair for pair in self.parameters if not chosen(*pair)]
        return replace(self, parameters=picked), replace(self, parameters=rest)

    def own_decay(self, default: float) -> float:
        """Return the weight decay, or ``default`` if no group of the spec gives it."""
        return self.weight_decay if self.decay_given else default


@dataclass(frozen=True)
class Rule:
    """An optimizer of torch over groups of parameters; the job's log calls it ``name``.

    ``moments`` are what its state holds of each parameter, in the parameter's shape, by torch's names: they begin at
    zero, and checkpoints have them. ``counts``: whether it counts, as ``step``, the updates of each parameter. What it
    keeps beside these would be lost.
    """

    name: str
    optimizer: Optimizer
    moments: tuple[str, ...]
    groups: Sequence[UpdateGroup]
    counts: bool = True

    def prime(self, step: int, behind: Mapping[Tensor, int]) -> None:
        """Give it the state that it would have created by ``step``, so that a checkpoint can be loaded into it.

        The counts of steps aren't tensors of a checkpoint: its step says them, but for parameters that are ``behind``
        (:meth:`behind`).
        """
        defaults = self.optimizer.defaults
        on_device = bool(defaults.get("fused") or defaults.get("capturable"))
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state: dict[str, Tensor] = {moment: torch.zeros_like(parameter) for moment in self.moments}
                if self.counts:
                    count = float(behind.get(parameter, step))
                    state[_COUNT] = torch.tensor(count, device=parameter.device if on_device else "cpu")
                self.optimizer.state[parameter] = state

    def behind(self, step: int) -> dict[Tensor, int]:
        """Return the counts that are not ``step``, of parameters that lacked a gradient."""
        groups = self.optimizer.param_groups if self.counts else ()
        learning = [each for group in groups for each in group["params"] if each.requires_grad]
        counts = [torch.as_tensor(self.optimizer.state[each][_COUNT]) for each in learning]
        found = torch.stack(counts).tolist() if counts else []
        return {each: int(count) for each, count in zip(learning, found, strict=True) if count != step}

    def check_state(self) -> None:
        """Raise ``ValueError`` for what it keeps of a parameter and a checkpoint does not."""
        held = {*self.moments, *([_COUNT] if self.counts else ())}
        kind, what = type(self.optimizer).__name__, "and checkpoints do not hold it"
        for of_whom, state in self.optimizer.state.items():
            if not isinstance(state, dict):
                raise lost(kind, f"state[{of_whom!r}]", f"kept beside what is of each parameter, {what}")
            if others := sorted(map(str, state.keys() - held)):
                what = f"kept of each parameter, {what}; expected it among the moments of its Rule"
                raise lost(kind, f"state[…][{others[0]!r}]", what)

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Yield by name what its optimizer keeps in its groups, but for what a schedule changes, and the numbers among
        its public attributes: others may be its groups under another name, or what torch notes for itself.
        """
        for place, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if key not in ("params", "lr"):
                    yield f"param_groups[{place}][{key!r}]", value
        for name, value in vars(self.optimizer).items():
            if isinstance(value, int | float) and not name.startswith("_"):
                yield name, value


Factory = Callable[[Any, Sequence[UpdateGroup], torch.device], Sequence[Rule]]
"""Makes the rules of a configuration; an :class:`~service.jobs.plugins.OptimizerKind` names one. Each parameter of the
groups is in one rule.
"""
