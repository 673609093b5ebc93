"""Trains programs of installed packages: modules with a loop of their own, which the job steps, saves and measures."""

from service.training.programs.loop import ProgramLoop
from service.training.programs.setup import prepare_program

__all__ = ["ProgramLoop", "prepare_program"]
