"""Provides the ``trivet`` command."""

from trivet.cli.main import main

__all__ = ["main"]
