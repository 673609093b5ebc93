"""Jobs of a service on this machine's GPUs, for tests."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from local_service import processes_of
from running_service import LIMIT_S, Service
from waiting import eventually

GPUS = torch.cuda.device_count()


def ended(service: Service, spec: dict[str, Any], state: str = "succeeded") -> dict[str, Any]:
    """The job of a spec at its end, when none of its processes is left."""
    job = service.wait(service.submit(spec)["id"])
    assert job["state"] == state, job["error"]
    nothing_left_of(job["id"])
    return job


def nothing_left_of(job_id: str) -> None:
    """A process that is gone holds no memory of a device either."""
    eventually(lambda: not list(processes_of(job_id)), LIMIT_S)


def ranks_of(job_id: str) -> list[psutil.Process]:
    return [each for each in processes_of(job_id) if "workers.rank" in " ".join(each.cmdline())]


def signal_ranks(job_id: str, number: int) -> None:
    for process in ranks_of(job_id):
        process.send_signal(number)


def losses(service: Service, job_id: str) -> list[float]:
    series = service.http.get(f"/v1/jobs/{job_id}/metrics", params={"names": "loss"}).raise_for_status().json()
    return [float(each) for each in series["series"]["loss"]["value"]]
