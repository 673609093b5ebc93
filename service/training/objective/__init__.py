"""Holds what training minimises and evaluation reports: one file per objective, found by its declaration."""

from service.training.objective.base import Factory, Objective, ObjectiveContext, objective_for

__all__ = ["Factory", "Objective", "ObjectiveContext", "objective_for"]
