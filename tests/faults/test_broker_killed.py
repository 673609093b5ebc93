"""What an answer of the broker is worth when it is killed, for each setting of its append-only file."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import get_args

import pytest
from digits import digits_job

from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker, Fsync
from service.jobs.records import NotFound
from service.jobs.spec.train import TrainSpec
from service.jobs.store import Store, StoreUnavailable

SPEC = TrainSpec.model_validate(digits_job(batch={"global": 1}))


@pytest.mark.parametrize("fsync", get_args(Fsync))
def test_an_accepted_job_outlives_the_kill_of_the_broker(tmp_path: Path, data: DataLayout, fsync: Fsync) -> None:
    """Under ``everysec`` the server may answer before it writes, while it syncs what it wrote before: then the newest
    jobs are lost, and no older one.
    """
    with EmbeddedBroker.start(tmp_path / "broker", fsync=fsync) as broker:
        store = Store.connect(broker.url, data)
        accepted: list[str] = []
        many = threading.Event()

        def submit() -> None:
            try:
                while True:
                    accepted.append(store.jobs.submit(SPEC, "ada")[0].id)
                    if len(accepted) == 50:
                        many.set()
            except StoreUnavailable:
                many.set()

        submitting = threading.Thread(target=submit)
        submitting.start()
        many.wait()
        broker.process.kill()
        broker.process.wait()
        submitting.join()
        broker.restart()
        kept = [job_id for job_id in accepted if there(store, job_id)]
        assert len(accepted) >= 50
        assert kept == accepted[: len(kept)]
        if fsync != "everysec":
            assert kept == accepted
        store.close()


def there(store: Store, job_id: str) -> bool:
    try:
        return store.jobs.get(job_id).id == job_id
    except NotFound:
        return False
