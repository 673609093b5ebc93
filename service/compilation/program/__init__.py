"""Defines the checked programs: those of models and of pipeline stages, beside those of packages."""

from service.models.program import Parts, Program, Site, Step

__all__ = ["Parts", "Program", "Site", "Step"]
