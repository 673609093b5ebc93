"""Updates parameters: a file for each optimizer, found by its declaration."""

from service.training.optimizers.base import Factory, Group, Rule, matches
from service.training.optimizers.updater import OptimizerError, Updater, updater_for

__all__ = ["Factory", "Group", "OptimizerError", "Rule", "Updater", "matches", "updater_for"]
