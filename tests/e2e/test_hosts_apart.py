"""Two workers that share a broker and an object store, and no folder: what one began goes on on the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
from digits import digits_job
from object_server import object_server
from waiting import LIMIT_S, eventually

from benchmarks.api_process import ApiProcess
from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.records import Job
from trivet import Client

pytestmark = [pytest.mark.slow(45), pytest.mark.distributed]
SPEC = digits_job(64, steps=4000, batch={"global": 64}, device="cpu", checkpoint={"every": 400})


class Site:
    """An API and workers, each with a data folder of its own."""

    def __init__(self, folder: Path, broker: str, store: str) -> None:
        self._folder = folder
        self._shared = {"TRIVET_REDIS_URL": broker, "TRIVET_STORE": store, "TRIVET_LEASE_S": "6"}
        self._api = ApiProcess(self._settings("api"), folder / "api.log", ("trivet", "api"))
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def data(self, name: str) -> DataLayout:
        return DataLayout(self._folder / name)

    def start(self, name: str) -> None:
        """Start the ``api``, or a worker of this name."""
        if name == "api":
            self._api.start()
            return
        outer = {key: value for key, value in os.environ.items() if not key.startswith("TRIVET_")}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._workers[name] = subprocess.Popen(
                [sys.executable, "-m", "workers"], env={**outer, **self._settings(name)}, stdout=log, stderr=log
            )

    def _settings(self, name: str) -> dict[str, str]:
        own = {"TRIVET_DATA": str(self.data(name).root), "TRIVET_CPU_SLOTS": "2", "TRIVET_WORKER_NAME": name}
        own |= {"TRIVET_WARM_SUPERVISORS": "1", "TRIVET_STOP_JOBS": "true", "OMP_NUM_THREADS": "1"}
        own["CUDA_VISIBLE_DEVICES"] = ""
        return {**self._shared, **own}

    @cached_property
    def client(self) -> Client:
        return Client(self._api.url, self.data("api").admin_key.read_text().strip())

    def ended(self, job: Job) -> Job:
        return eventually(lambda: now if (now := self.client.job(job.id)).ended_at is not None else None)

    def stop(self, name: str) -> None:
        process = self._workers.pop(name)
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)

    def close(self) -> None:
        for name in list(self._workers):
            self.stop(name)
        self._api.stop()

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("*.log")))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with EmbeddedBroker.start(tmp_path / "broker") as broker, object_server() as store:
        site = Site(tmp_path, broker.url, store)
        yield site
        site.close()


def test_a_training_goes_on_elsewhere_to_the_same_bits_and_others_start_from_it(site: Site, tmp_path: Path) -> None:
    site.start("api")
    site.start("one")
    client = site.client
    undisturbed = client.submit(SPEC)
    assert site.ended(undisturbed).state == "succeeded", site.said()
    moved = client.submit(SPEC)
    eventually(lambda: any(each.name.startswith("checkpoints/") for each in client.artifacts(moved.id)))
    site.stop("one")  # the job goes back to the queue
    site.start("two")
    ended = site.ended(moved)
    assert (ended.state, ended.attempt) == ("succeeded", 2), site.said()
    assert not site.data("two").job(undisturbed.id).root.exists()
    assert any("resumed from the checkpoint of step" in line for line in client.logs(moved.id))
    models = [tmp_path / each.id for each in (undisturbed, moved)]
    for model in models:
        client.download(model.name, "model.safetensors", model)
    assert models[0].read_bytes() == models[1].read_bytes()

    stored = client.upload(models[0])
    robustness = {"data": {"source": "digits"}, "count": 4, "eps": 0.01}
    verify = {"kind": "verify", "property": {"robustness": robustness}, "method": "crown"}
    train = {**SPEC, "model": {"safetensors": stored.id, **SPEC["model"]}, "steps": 5}
    for spec in ({**verify, "model": {"job": undisturbed.id}}, train):
        other = site.ended(client.submit(spec))
        assert other.state == "succeeded", (other.error, site.said())
