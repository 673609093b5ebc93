"""Gets devices from Ray: one Ray job for each attempt, with a placement group, and one process in each of its bundles.

The worker talks to Ray's dashboard alone, by its REST interface, and imports nothing of Ray. The job that it submits
runs this module (``python -m workers.launchers.ray``) on a node of the cluster: it asks for the placement group, starts
the command of the attempt once in each bundle, and ends with the last of them. Needs Ray 2.40 or newer with its
dashboard (``ray[default]``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from workers.launchers import (
    AllocatedHost,
    AllocationRequest,
    Booking,
    Launcher,
    LauncherContext,
    LauncherUnavailable,
    Pool,
    own_environment,
)
from workers.linux import die_with_parent

_ANSWER_S = 30.0
_NAME = "trivet-"
_HERE = "TRIVET_RAY"
"""The variable that tells the command which bundle it is in."""
_DASHBOARD = "http://127.0.0.1:8265"
_MOST = 10_000
_LOOK_S = 0.5
_LOOK_AGAIN_S = 15.0
"""Seconds until a placement group that waits may be asked for in another shape, as after a node was lost."""
_MARGIN_S = 15.0
"""Seconds that hosts have to report beyond the grace of their ranks, before Ray ends them."""


logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells of each request, and there is one each second


@dataclass(frozen=True)
class AskedDevices:
    """Says what the job asks Ray for, in its command line."""

    token: str
    """Names the allocation."""
    ranks: int
    max_hosts: int
    device: str
    extra: Mapping[str, float]
    """Further resources for each device."""
    command: Sequence[str]
    log: str


class Ray(Launcher):
    """Asks the dashboard of a Ray cluster. ``priority`` means nothing to Ray, and ``timeout_s`` is the supervisor's."""

    def __init__(self, context: LauncherContext) -> None:
        super().__init__(context)
        parser = argparse.ArgumentParser(prog="TRIVET_RAY_OPTIONS", exit_on_error=False, add_help=False)
        parser.add_argument("--address", default=os.environ.get("RAY_API_SERVER_ADDRESS", _DASHBOARD))
        parser.add_argument("--resources", type=json.loads, default={})
        try:
            options, unknown = parser.parse_known_args(shlex.split(context.options))
        except argparse.ArgumentError as error:
            raise ValueError(f"TRIVET_RAY_OPTIONS: {error}") from error
        if unknown:
            raise ValueError(f"TRIVET_RAY_OPTIONS: {' '.join(unknown)} is none of --address and --resources")
        self._extra: dict[str, float] = options.resources
        self._http = httpx2.Client(base_url=options.address, timeout=_ANSWER_S, headers=_headers(os.environ))

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
        words = (sys.executable, "-P", "-m", "workers.launchers.ray", json.dumps(asdict(asked)))
        patience_s = math.ceil(self.context.stop_grace_s + _MARGIN_S)
        body = {
            "submission_id": f"{_NAME}{asked.token}",
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
        """Stop jobs: each tells its hosts, and has the grace of ranks to end."""
        for allocation in allocations:
            self._call("POST", f"/api/jobs/{_NAME}{allocation.id}/stop", gone_is_fine=True)

    @staticmethod
    def here(environment: Mapping[str, str]) -> AllocatedHost:
        """Return what this bundle has. The kernel ends this process with Ray's own one that started it, since Ray gives
        the devices to others then. SIGINT, which Ray blocks in all that it starts, stops supervisors.
        """
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        told = json.loads(environment[_HERE])
        if os.getppid() != told.pop("parent"):
            raise SystemExit("the process of Ray that started this one has ended")
        return AllocatedHost(**told)

    def _state(self, what: str, **query: str) -> list[dict[str, Any]]:
        """Return what Ray's interface of states has of nodes or placement groups."""
        answer = self._call("GET", f"/api/v0/{what}", params={"limit": str(_MOST), **query})
        if not answer["result"]:
            raise LauncherUnavailable(f"Ray: {answer['msg']}")
        return list(answer["data"]["result"]["result"])

    def _call(self, method: str, path: str, gone_is_fine: bool = False, **content: Any) -> Any:
        try:
            answer = self._http.request(method, path, **content)
        except httpx2.HTTPError as error:
            raise LauncherUnavailable(f"Ray at {self._http.base_url}: {error or type(error).__name__}") from error
        if answer.status_code == 404 and gone_is_fine:
            return None
        if not answer.is_success:
            last = (answer.text.strip().splitlines() or [answer.reason_phrase])[-1]
            raise LauncherUnavailable(f"Ray at {self._http.base_url}: {answer.status_code}, {last}")
        return answer.json()


def _headers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what shows Ray its token, where the cluster has one, from the places where Ray's own clients look."""
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    token = environment.get("RAY_AUTH_TOKEN") or (path.read_text().strip() if path.is_file() else "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _booking(job: Mapping[str, Any], group: str) -> Booking:
    is_waiting = job["status"] == "PENDING" or group in ("", "PENDING")
    why = "its placement group waits for nodes" if group == "PENDING" else "it starts"
    return Booking(
        job["submission_id"].removeprefix(_NAME),
        job["metadata"]["trivet_job"],
        is_waiting,
        f"Ray job {job['submission_id']}: {why}" if is_waiting else "",
    )


def bundles(ranks: int, max_hosts: int, nodes: Sequence[int]) -> list[int] | None:
    """Return on how many devices of each node ranks are to run, the most first, where nodes have so many: on as few
    nodes as can be, and as evenly as these allow; ``None`` where they have too few.
    """
    largest = sorted(nodes, reverse=True)
    for count in range(1, min(max_hosts, ranks, len(nodes)) + 1):
        chosen, left, parts = largest[:count], ranks, list[int]()
        if sum(chosen) < ranks or chosen[-1] < 1:
            continue
        for has, others in zip(reversed(chosen), range(count, 0, -1), strict=True):
            parts.append(min(has, left // others))
            left -= parts[-1]
        return sorted(parts, reverse=True)
    return None


class RayBundle:
    """Runs the command in one bundle; an actor of Ray."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def node(self) -> str:
        """Return the address of the node."""
        return str(_ray().util.get_node_ip_address())

    def run(self, command: Sequence[str], here: Mapping[str, Any], log: str) -> int:
        """Run the command, and return its exit code."""
        environment = {**own_environment(), _HERE: json.dumps({**here, "parent": os.getpid()})}
        with Path(log).open("ab") as printed:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )
        return self._process.wait()

    def stop(self) -> None:
        """Send SIGTERM to the command, upon which ranks write a checkpoint."""
        if self._process is not None:
            self._process.terminate()


def _ray() -> Any:
    """Return Ray, which only its own nodes need."""
    return importlib.import_module("ray")


def _pool(device: str) -> str:
    """Return what Ray calls the devices that are asked for."""
    has_gpus = _ray().cluster_resources().get("GPU", 0) > 0
    return "GPU" if device == "cuda" or (device == "auto" and has_gpus) else "CPU"


def _shape(asked: AskedDevices, pool: str) -> list[int]:
    """Return bundles that are free now, else such as the nodes have at all, else such as nodes might that come yet."""
    state = importlib.import_module("ray._private.state")
    free = [int(node.get(pool, 0)) for node in state.available_resources_per_node().values()]
    total = [int(node["Resources"].get(pool, 0)) for node in _ray().nodes() if node["Alive"]]
    evenly = [math.ceil(asked.ranks / asked.max_hosts)] * asked.max_hosts
    for nodes in (free, total, evenly):
        if (found := bundles(asked.ranks, asked.max_hosts, nodes)) is not None:
            return found
    raise AssertionError("even bundles hold all ranks")


def _resources(asked: AskedDevices, pool: str, devices: int) -> dict[str, float]:
    return {pool: devices, **{name: each * devices for name, each in asked.extra.items()}}


def _reserve(asked: AskedDevices, pool: str) -> tuple[Any, list[int]]:
    """Return a placement group that has its nodes, and the devices of each bundle."""
    util, tries = importlib.import_module("ray.util"), 0
    while True:
        sizes = _shape(asked, pool)
        group = util.placement_group(
            [_resources(asked, pool, size) for size in sizes],
            strategy="STRICT_SPREAD" if len(sizes) > 1 else "PACK",
            name=f"{_NAME}{asked.token}.{tries}",
        )
        while not group.wait(_LOOK_AGAIN_S):
            if _shape(asked, pool) != sizes:
                util.remove_placement_group(group)
                tries += 1
                break
        else:
            return group, sizes


def _start(asked: AskedDevices, pool: str) -> tuple[list[Any], list[Any]]:
    """Start the command in each bundle; return the actors, and what tells that their commands have ended."""
    ray = _ray()
    group, sizes = _reserve(asked, pool)
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    actors = [
        ray.remote(RayBundle)
        .options(
            num_cpus=size if pool == "CPU" else 0,
            num_gpus=size if pool == "GPU" else 0,
            max_concurrency=3,
            runtime_env={"env_vars": {"RAY_worker_niceness": "0"}},
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote()
        for index, size in enumerate(sizes)
    ]
    nodes = ray.get([actor.node.remote() for actor in actors])
    facts = {"submission": f"{_NAME}{asked.token}", "nodes": ",".join(nodes)}
    kind: Pool = "cuda" if pool == "GPU" else "cpu"
    hosts = [AllocatedHost(asked.token, index, len(sizes), kind, size, facts) for index, size in enumerate(sizes)]
    ended = [
        actor.run.remote(asked.command, asdict(host), asked.log) for actor, host in zip(actors, hosts, strict=True)
    ]
    return actors, ended


def main(arguments: Sequence[str]) -> None:
    """Be the driver of one allocation: return when the command has ended in each bundle, or with its node."""
    asked = AskedDevices(**json.loads(arguments[0]))
    ray = _ray()
    ray.init(log_to_driver=False)
    actors, running = _start(asked, _pool(asked.device))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    told = False
    while running:
        _, running = ray.wait(running, timeout=_LOOK_S)
        if stop.is_set() and not told:
            told = True
            for actor in actors:
                actor.stop.remote()  # of one that has ended nothing is heard


if __name__ == "__main__":
    main(sys.argv[1:])
