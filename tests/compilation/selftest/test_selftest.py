"""The harness proves its detectors on injected faults, and would notice one that does not fire."""

from __future__ import annotations

import pytest

from service.compilation import detectors
from service.compilation.selftest import run, self_test
from service.compilation.selftest.faults import FAULTS

pytestmark = pytest.mark.usefixtures("_imports_set_aside")


def test_every_detector_fires_on_its_fault_and_none_without_one() -> None:
    proofs = self_test()
    assert [proof for proof in proofs if not proof.holds] == []
    assert {proof.detector for proof in proofs} == {
        *(each.__module__.split(".")[-1] for each in detectors.DETECTORS),
        "none",
    }
    assert self_test() is proofs


def test_a_detector_that_does_not_fire_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = next(each for each in FAULTS if each.detector == "vacuous")
    monkeypatch.setattr(detectors, "DETECTORS", ())
    proof = run._proof(fault)
    assert not proof.fired
    assert not proof.holds
