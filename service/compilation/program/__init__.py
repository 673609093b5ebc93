"""Defines the checked programs: those of models and of pipeline stages, beside those of packages."""

from service.models.program import Maker, Parts, Program, Site, Step

__all__ = ["Maker", "Parts", "Program", "Site", "Step"]
