"""Holds the objectives of training and evaluation: one file for each, found by its declaration."""

from service.training.objective.base import Factory, Objective, ObjectiveContext, objective_for

__all__ = ["Factory", "Objective", "ObjectiveContext", "objective_for"]
