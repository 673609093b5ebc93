"""Tests the harness itself: every detector must fire on a fault injected for it."""

from service.compilation.selftest.run import Proof, SelfTest, kept_or_run, self_test

__all__ = ["Proof", "SelfTest", "kept_or_run", "self_test"]
