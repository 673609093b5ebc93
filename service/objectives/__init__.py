"""Holds what training minimises and evaluation reports, and under what a model is compile-checked: a file for each
objective, found by its declaration.
"""

from service.objectives.base import Factory, Objective, ObjectiveContext, check_learns_nothing, objective_for

__all__ = ["Factory", "Objective", "ObjectiveContext", "check_learns_nothing", "objective_for"]
