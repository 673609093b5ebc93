"""Exports of ended jobs lead where webhooks may, and to what the operator names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import redis as redis_py
from digits import digits_job
from export_receiver import ExportReceiver, export_receiver
from pydantic import SecretStr
from serving import serving
from waiting import eventually

from service.jobs.settings import Settings
from service.jobs.spec.train import TrainSpec

SPEC = digits_job()


@pytest.fixture
def receiver() -> Iterator[ExportReceiver]:
    with export_receiver() as receiving:
        yield receiving


def test_exports_lead_to_no_private_address_but_what_the_operator_names(
    broker: str, redis: redis_py.Redis, tmp_path: Path, receiver: ExportReceiver
) -> None:
    """A job that names one is refused; one that was taken before is over all the same, and only told the operator's."""
    settings = Settings(data=tmp_path, redis_url=SecretStr(broker), export_otlp=f"{receiver.url}/own")
    with serving(settings) as service:
        key = {"Authorization": f"Bearer {service.store.keys.create('root', ['admin'])[1]}"}
        with httpx2.Client(base_url=service.url, headers=key, timeout=300.0) as client:
            refusal = client.post("/v1/jobs", json={**SPEC, "export": {"mlflow": receiver.url}})
            assert refusal.status_code == 422
            assert "export.mlflow" in refusal.text
            taken = {**SPEC, "export": {"mlflow": receiver.url, "otlp": settings.export_otlp}}
            job = service.store.jobs.submit(TrainSpec.model_validate(taken), "root")[0].id
            assert client.post(f"/v1/jobs/{job}/cancel").is_success

            def told() -> list[str]:
                lines = client.get(f"/v1/jobs/{job}/logs", params={"stream": "service"}).text.splitlines()
                return sorted(line.partition("] ")[2] for line in lines if "export" in line)

            refused, own = eventually(lambda: len(found := told()) == 2 and found)
            assert refused.startswith("export to mlflow failed: ForbiddenTarget")
            assert own == f"exported to otlp: {receiver.url}/own"
            shown = client.get(f"/v1/jobs/{job}").json()
    assert shown["state"] == "cancelled"
    assert shown["spec"]["export"] == {
        "mlflow": receiver.url,
        "tensorboard": None,
        "otlp": settings.export_otlp,
        "huggingface": None,
    }
    assert {each.path for each in receiver.taken} == {"/own/v1/logs"}
