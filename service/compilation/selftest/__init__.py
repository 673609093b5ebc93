"""Tests the harness on itself: every detector has to fire on a fault that is injected for it."""

from service.compilation.selftest.run import Proof, SelfTest, kept_or_run, self_test

__all__ = ["Proof", "SelfTest", "kept_or_run", "self_test"]
