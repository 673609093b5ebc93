"""Updates all parameters of a rank by the rules of the job's optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from service.jobs.plugins import OptimizerConfig, matches
from service.jobs.runtime import RefusedError
from service.jobs.spec.optimizer import OPTIMIZERS
from service.models.held_state import HeldState
from service.parallel.tensor.placement import global_parameters, global_rows
from service.training.optimizers.base import Factory, Rule, UpdateGroup


class OptimizerError(RefusedError, ValueError):
    """The optimizer's patterns do not fit the model's parameters."""


class Updater:
    """Holds the rules of an optimizer over a rank's parameters. ``frozen`` ones stay as they are."""

    def __init__(self, rules: Sequence[Rule], frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.rules = rules
        self._frozen = frozen
        kinds = [type(rule.optimizer) for rule in rules]
        self._held = [
            HeldState(kind.__name__, "step", rule.settings, (kind,)) for kind, rule in zip(kinds, rules, strict=True)
        ]

    def drop_frozen(self) -> None:
        """Forget the gradients of frozen parameters, before they are counted in a norm."""
        for _, parameter in self._frozen:
            parameter.grad = None

    def step(self, share: float) -> None:
        """Update every parameter at this share of its peak rate, and forget the gradients."""
        for rule in self.rules:
            for group in rule.optimizer.param_groups:
                group["lr"] = group["peak"] * share
            rule.optimizer.step()
            rule.optimizer.zero_grad()

    def check_state(self) -> None:
        """Raise ``ValueError`` for what the rules keep and checkpoints would lose."""
        for rule, held in zip(self.rules, self._held, strict=True):
            rule.check_state()
            held.check()

    def prime(self, step: int, behind: Mapping[Tensor, int]) -> None:
        """Give the rules the state that they would have created by ``step``; ``behind`` are the counts of
        :meth:`behind` then.
        """
        for rule in self.rules:
            rule.prime(step, behind)

    def behind(self, step: int) -> dict[Tensor, int]:
        """Return the counts of parameters that had no gradient in some step until ``step``, as a layer that is skipped
        at random has none: their rules have left them as they were.
        """
        return {parameter: count for rule in self.rules for parameter, count in rule.behind(step).items()}

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return what is kept of a parameter, by name; nothing of a frozen one. The tensors are the state itself."""
        for rule in self.rules:
            if parameter in rule.optimizer.state:
                state = rule.optimizer.state[parameter]
                return {moment: state[moment] for moment in rule.moments}
        return {}

    def names(self) -> dict[str, list[str]]:
        """Return the names of this rank's parameters by the rule that updates them; ``frozen`` are the rest, those of
        the model among them.
        """
        pairs = {rule.name: [pair for group in rule.groups for pair in group.parameters] for rule in self.rules}
        found = {rule: [name for name, each in own if each.requires_grad] for rule, own in pairs.items()}
        still = [name for own in pairs.values() for name, each in own if not each.requires_grad]
        frozen = [*still, *(name for name, _ in self._frozen)]
        return found | ({"frozen": frozen} if frozen else {})


def updater_for(
    config: OptimizerConfig, stages: Iterable[nn.Module], names: Iterable[str], device: torch.device
) -> Updater:
    """Return the updater of this rank's stages; ``names`` are those of all parameters of the whole model.

    Raises :class:`OptimizerError` for a pattern that no parameter has, and if all are frozen.
    """
    names = list(names)
    for path, message, got, expected in config.check(names):
        raise OptimizerError(f"{path}: {message}: {got!r}; expected {expected}")
    stages = list(stages)
    parameters = [pair for stage in stages for pair in global_parameters(stage)]
    rows = {name: count for stage in stages for name, count in global_rows(stage).items()}
    groups, frozen = _grouped(config, parameters, rows)
    is_whole = {name for name, _ in parameters} == set(names)  # and no stage, of which others may learn
    if is_whole and not any(each.requires_grad for group in groups for _, each in group.parameters):
        raise OptimizerError(
            "optimizer: every parameter is frozen, by the model or by optimizer.groups; expected one that learns"
        )
    factory: Factory = OPTIMIZERS.function(config.name)
    return Updater(factory(config, groups, device) if groups else (), frozen)


def _grouped(
    config: OptimizerConfig, parameters: Sequence[tuple[str, nn.Parameter]], rows: Mapping[str, int]
) -> tuple[list[UpdateGroup], list[tuple[str, nn.Parameter]]]:
    """Return the groups that have parameters, that of the rest last, and the frozen parameters."""
    left, groups, frozen = list(parameters), [], []
    for asked in config.groups:
        own = [pair for pair in left if matches(pair[0], asked.match)]
        left = [pair for pair in left if not matches(pair[0], asked.match)]
        decay = config.weight_decay if asked.weight_decay is None else asked.weight_decay
        if asked.frozen:
            frozen += own
        else:
            given = asked.weight_decay is not None
            groups.append(UpdateGroup(own, config.lr * asked.lr_scale, decay, given, rows))
    groups.append(UpdateGroup(left, config.lr, config.weight_decay, rows=rows))
    return [group for group in groups if group.parameters], frozen
