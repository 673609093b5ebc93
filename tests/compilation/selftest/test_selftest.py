"""The harness proves its detectors on injected faults, and would notice one that does not fire."""

from __future__ import annotations

import pytest
from lanes import slow_but_for

from service.compilation import detectors
from service.compilation.selftest import Proof, run, self_test
from service.compilation.selftest.faults import FAULTS, Fault

PLANTED = {fault.name: fault for fault in FAULTS}
ALIKE = ("module attribute", "buffer", "retained gradient", "output of inference")
"""What may be stale like an output, or a gradient, which the fast command has."""
FAST = [name for name in PLANTED if not (name.startswith("a stale") and any(each in name for each in ALIKE))]


@pytest.mark.parametrize("name", slow_but_for(PLANTED, *FAST))
def test_a_detector_fires_on_its_fault(name: str) -> None:
    assert run._proof(PLANTED[name]).holds


def test_none_fires_without_a_fault_and_each_has_one() -> None:
    assert run._silence().holds
    assert {fault.detector for fault in FAULTS} == {each.__module__.split(".")[-1] for each in detectors.DETECTORS}


def test_the_proofs_are_of_all_faults_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def proof(fault: Fault) -> Proof:
        made.append(fault.name)
        return Proof(fault.detector, fault.name, True, "")

    monkeypatch.setattr(run, "_proof", proof)
    monkeypatch.setattr(run, "_silence", lambda: Proof("none", "nothing", False, ""))
    self_test.cache_clear()
    try:
        proofs = self_test()
        assert self_test() is proofs
    finally:
        self_test.cache_clear()
    assert made == list(PLANTED)
    assert [each.fault for each in proofs] == [*PLANTED, "nothing"]


def test_a_detector_that_does_not_fire_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = next(each for each in FAULTS if each.detector == "vacuous")
    monkeypatch.setattr(detectors, "DETECTORS", ())
    proof = run._proof(fault)
    assert not proof.fired
    assert not proof.holds
