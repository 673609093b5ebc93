"""Trains and runs programs of installed packages: modules with a loop of their own, which a job steps, saves and
measures.
"""

from service.training.programs.loop import ProgramLoop
from service.training.programs.setup import prepare_training

__all__ = ["ProgramLoop", "prepare_training"]
