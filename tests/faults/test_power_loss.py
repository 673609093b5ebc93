"""The broker's machine loses power: what was answered is still there, and no attempt's number is given twice.

Emulated: the server is killed, and its append-only file cut to the size that it had when it was last synced.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from digits import digits_job

from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker, Fsync
from service.jobs.records import AttemptRef, NotFound, Superseded
from service.jobs.spec.train import TrainSpec
from service.jobs.store import HostReport, Store, StoreLimits

SPEC = TrainSpec.model_validate(digits_job(batch={"global": 1}))
LIMITS = StoreLimits(lease_s=3600, starting_lease_s=3600, heartbeat_s=3600)


@dataclass
class Machine:
    """A broker on a machine that can lose power."""

    folder: Path
    log: Path
    library: Path
    patch: pytest.MonkeyPatch
    fsync: Fsync = "always"
    broker: EmbeddedBroker | None = None

    def power_on(self) -> None:
        with self.patch.context() as patch:
            patch.setenv("LD_PRELOAD", str(self.library))
            patch.setenv("SYNCED_LOG", str(self.log))
            self.broker = EmbeddedBroker.start(self.folder, fsync=self.fsync)

    def lose_power(self) -> None:
        """Kill the server, and with it what it had not written yet; cut the file to what was synced."""
        assert self.broker is not None
        self.broker.process.kill()
        self.broker.process.wait()
        self.broker.stop()
        self.broker = None
        synced = dict(reversed(line.split(" ", 1)) for line in self.log.read_text().splitlines())
        (increments,) = self.folder.glob("appendonlydir/*.incr.aof")
        os.truncate(increments, int(synced.get(str(increments.resolve()), 0)))

    def store(self) -> Store:
        assert self.broker is not None
        return Store.connect(self.broker.url, DataLayout(self.folder / "data"), LIMITS)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next((path for name in ("cc", "gcc", "g++") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("needs a C compiler: which bytes are synced is seen by a library that is loaded into the broker")
    built = tmp_path_factory.mktemp("synced") / "synced.so"
    source = Path(__file__).with_name("synced.c")
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    return built


@pytest.fixture
def machine(
    request: pytest.FixtureRequest, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    fsync = getattr(request, "param", "always")
    machine = Machine(tmp_path / "broker", tmp_path / "synced.log", library, monkeypatch, fsync)
    machine.power_on()
    if not machine.log.exists():
        pytest.skip("the broker's executable does not take a preloaded library")
    yield machine
    if machine.broker is not None:
        machine.broker.stop()


def test_an_accepted_job_outlives_a_loss_of_power_at_the_next_moment(machine: Machine) -> None:
    accepted = []
    for _ in range(5):
        job, created = machine.store().jobs.submit(SPEC, "ada")
        assert created
        accepted.append(job.id)
        machine.lose_power()
        machine.power_on()
        for job_id in accepted:
            assert machine.store().jobs.get(job_id).state == "queued"


@pytest.mark.parametrize("machine", ["everysec"], indirect=True)
def test_under_everysec_an_accepted_job_can_be_lost(machine: Machine) -> None:
    """As the setting says, where the disk is slow; and so the test above can fail."""
    hold = machine.log.with_name(f"{machine.log.name}.hold")
    hold.touch()
    job, _ = machine.store().jobs.submit(SPEC, "ada")
    assert machine.store().jobs.get(job.id).state == "queued"
    machine.lose_power()
    hold.unlink()
    machine.power_on()
    with pytest.raises(NotFound):
        machine.store().jobs.get(job.id)


def test_a_cancel_and_a_revoked_key_outlive_a_loss_of_power(machine: Machine) -> None:
    store = machine.store()
    job, _ = store.jobs.submit(SPEC, "ada")
    key, secret = store.keys.create("ada", ["submit"])
    store.jobs.cancel(job.id)
    store.keys.revoke(key.id)
    machine.lose_power()
    machine.power_on()
    assert machine.store().jobs.get(job.id).state == "cancelled"
    assert machine.store().keys.verify(secret) is None


def test_no_number_of_an_attempt_that_began_is_given_again(machine: Machine) -> None:
    store = machine.store()
    store.hosts.beat(HostReport("a", "a", cpu_slots=2))
    job, _ = store.jobs.submit(SPEC, "ada")
    assert store.attempts.place() == [job.id]
    begun = AttemptRef(job.id, 1, "a")
    store.attempts.claim(begun, "before")
    machine.lose_power()
    machine.power_on()
    store = machine.store()
    assert store.jobs.get(job.id).state == "running"
    with pytest.raises(Superseded):
        store.attempts.claim(begun, "after")
    assert store.attempts.renew(begun) == "run"


def test_readiness_tells_whether_answers_outlive_a_loss_of_power(machine: Machine) -> None:
    store = machine.store()
    assert store.survives_power_loss()
    store.client.call("CONFIG", "SET", "appendfsync", "everysec")
    assert not store.survives_power_loss()
    store.client.call("CONFIG", "SET", "appendfsync", "always")
    store.client.call("CONFIG", "SET", "appendonly", "no")
    assert not store.survives_power_loss()


def test_a_broker_that_keeps_nothing_on_disk_is_known(machine: Machine) -> None:
    store = machine.store()
    assert not store.forgets_at_restart()
    store.client.call("CONFIG", "SET", "appendonly", "no")
    assert store.forgets_at_restart()
    store.client.call("CONFIG", "SET", "save", "60 1")
    assert not store.forgets_at_restart()
