"""Tests the harness on itself: every detector has to fire on a fault that is injected for it."""

from service.compilation.selftest.run import Proof, self_test

__all__ = ["Proof", "self_test"]
