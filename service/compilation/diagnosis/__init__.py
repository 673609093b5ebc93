"""Looks into a rung that failed: the smallest module that fails, a script that shows it, the compiler's trace."""

from service.compilation.diagnosis.diagnose import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
