"""Gets devices from Ray: one Ray job for each attempt, with a placement group, and one process in each of its bundles.

The worker uses only the REST interface of Ray's dashboard and imports nothing of Ray. It submits
:mod:`workers.launchers.ray_job` as a job. It was tried with Ray 2.60 and needs its dashboard
(``ray[default]``).
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2

from service.linux import die_with_parent
from workers.launchers import AllocatedHost, AllocationRequest, Booking, Launcher, LauncherContext, LauncherUnavailable
from workers.launchers.asking import ANSWER_S, NAME, REPORT_S, OperatorOptions, errors_of, refused
from workers.launchers.ray_job import HERE, PROGRAM, AskedDevices

_DASHBOARD = "http://127.0.0.1:8265"
_MOST = 10_000

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request, and there is one every second


class Ray(Launcher):
    """Asks the dashboard of a Ray cluster. ``priority`` means nothing to Ray, and ``timeout_s`` is the supervisor's."""

    def __init__(self, context: LauncherContext) -> None:
        super().__init__(context)
        declared = OperatorOptions("ray")
        declared.add_argument("--address", default=os.environ.get("RAY_API_SERVER_ADDRESS", _DASHBOARD))
        declared.add_argument("--resources", type=json.loads, default={})
        options = declared.read(context.options)
        self._extra: dict[str, float] = options.resources
        self._at = f"Ray at {options.address}"
        self._http = httpx2.Client(base_url=options.address, timeout=ANSWER_S, headers=_headers(os.environ))

    def describe(self) -> str:
        """Return how many nodes there are, and their devices."""
        nodes = [node for node in self._state("nodes", detail="True") if node["state"] == "ALIVE"]
        total = sum((Counter(node["resources_total"]) for node in nodes), Counter[str]())
        return f"{len(nodes)} nodes, {total['CPU']:g} CPUs, {total['GPU']:g} GPUs"

    def request(self, request: AllocationRequest) -> str:
        """Submit a job that starts the command once in each bundle of a placement group."""
        log = self.context.folder / f"{request.job_id}.log"
        asked = AskedDevices(
            secrets.token_hex(5),
            request.ranks,
            request.max_hosts,
            request.device,
            self._extra,
            request.command,
            str(log),
        )
        words = (sys.executable, "-P", "-m", PROGRAM, json.dumps(asdict(asked)))
        patience_s = math.ceil(self.context.stop_grace_s + REPORT_S)
        body = {
            "submission_id": f"{NAME}{asked.token}",
            "entrypoint": f"exec {shlex.join(words)} >> {shlex.quote(str(log))} 2>&1",
            "metadata": {"trivet_service": self.context.service, "trivet_job": request.job_id},
            "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(patience_s)}},
        }
        return str(self._call("POST", "/api/jobs/", json=body)["submission_id"])

    def allocations(self) -> list[Booking]:
        """Return the jobs of this service that Ray has not ended."""
        groups = {
            group["name"].partition(".")[0]: group["state"]
            for group in self._state(
                "placement_groups", filter_keys="state", filter_predicates="!=", filter_values="REMOVED"
            )
        }
        return [
            _booking(job, groups.get(job["submission_id"], ""))
            for job in self._call("GET", "/api/jobs/")
            if (job.get("metadata") or {}).get("trivet_service") == self.context.service
            and job["status"] in ("PENDING", "RUNNING")
        ]

    def cancel(self, allocations: Sequence[Booking]) -> None:
        """Stop jobs: each stops its hosts, and has the grace of ranks to end."""
        for allocation in allocations:
            self._call("POST", f"/api/jobs/{NAME}{allocation.id}/stop", gone_is_fine=True)

    @staticmethod
    def here(environment: Mapping[str, str]) -> AllocatedHost:
        """Return this bundle as a host. The kernel ends this process with the process of Ray that started it,
        since Ray then gives the devices to others.
        """
        die_with_parent()
        told = json.loads(environment[HERE])
        if os.getppid() != told.pop("parent"):
            raise SystemExit("the process of Ray that started this one has ended")
        return AllocatedHost(**told)

    def _state(self, what: str, **query: str) -> list[dict[str, Any]]:
        """Return Ray's list of nodes or placement groups."""
        answer = self._call("GET", f"/api/v0/{what}", params={"limit": str(_MOST), **query})
        if not answer["result"]:
            raise LauncherUnavailable(f"Ray: {answer['msg']}")
        return list(answer["data"]["result"]["result"])

    def _call(self, method: str, path: str, gone_is_fine: bool = False, **content: Any) -> Any:
        with errors_of(self._at, httpx2.HTTPError):
            answer = self._http.request(method, path, **content)
        if not answer.is_success:
            return refused(self._at, answer.status_code, answer.reason_phrase, answer.text, gone_is_fine)
        return answer.json()


def _headers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the header with Ray's token, if the cluster has one, from the places where Ray's own clients look."""
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    token = environment.get("RAY_AUTH_TOKEN") or (path.read_text().strip() if path.is_file() else "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _booking(job: Mapping[str, Any], group: str) -> Booking:
    is_waiting = job["status"] == "PENDING" or group in ("", "PENDING")
    why = "its placement group waits for nodes" if group == "PENDING" else "it starts"
    return Booking(
        job["submission_id"].removeprefix(NAME),
        job["metadata"]["trivet_job"],
        is_waiting,
        f"Ray job {job['submission_id']}: {why}" if is_waiting else "",
    )
