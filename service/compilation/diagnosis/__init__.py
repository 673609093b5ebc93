"""Investigates a failed rung: the smallest module that fails, a script that shows it, and the compiler's trace."""

from service.compilation.diagnosis.diagnose import Diagnosis, Reproduction, diagnose, diagnose_all

__all__ = ["Diagnosis", "Reproduction", "diagnose", "diagnose_all"]
