"""Defines the checked programs: their protocol, and the programs of models and of pipeline stages."""

from service.compilation.program.base import Maker, Parts, Program, Site, Step

__all__ = ["Maker", "Parts", "Program", "Site", "Step"]
