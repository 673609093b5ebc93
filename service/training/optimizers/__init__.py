"""Updates parameters: a file for each optimizer, found by its declaration."""

from service.training.optimizers.base import Factory, Rule, UpdateGroup
from service.training.optimizers.updater import OptimizerError, Updater, updater_for

__all__ = ["Factory", "OptimizerError", "Rule", "UpdateGroup", "Updater", "updater_for"]
