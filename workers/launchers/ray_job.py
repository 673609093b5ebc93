"""Runs the Ray job of one allocation (``python -m workers.launchers.ray_job``), on a node that Ray chooses.

It asks Ray for the placement group, starts the attempt's command once in each bundle, and ends with the last bundle.
:mod:`workers.launchers.ray` submits it.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers.launchers import AllocatedHost, Pool
from workers.launchers.asking import NAME, own_environment

PROGRAM = "workers.launchers.ray_job"
HERE = "TRIVET_RAY"
"""The variable that names the command's bundle."""
_LOOK_S = 0.5
_LOOK_AGAIN_S = 15.0
"""Seconds until a waiting placement group may be requested in another shape, for example after a node was lost."""


@dataclass(frozen=True)
class AskedDevices:
    """The job's request to Ray, as it stands in its command line."""

    token: str
    """The id of the allocation."""
    ranks: int
    max_hosts: int
    device: str
    extra: Mapping[str, float]
    """Further resources for each device."""
    command: Sequence[str]
    log: str


def bundles(ranks: int, max_hosts: int, nodes: Sequence[int]) -> list[int] | None:
    """Return the number of ranks for each node, the most first: as few nodes as possible, as evenly as these
    allow. Return ``None`` if the nodes have too few devices.
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
        return str(_ray().util.get_node_ip_address())

    def run(self, command: Sequence[str], here: Mapping[str, Any], log: str) -> int:
        """Run the command, and return its exit code."""
        environment = {**own_environment(), HERE: json.dumps({**here, "parent": os.getpid()})}
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
        """Send SIGTERM to the command, so that ranks write a checkpoint."""
        if self._process is not None:
            self._process.terminate()


def _ray() -> Any:
    """Return Ray, which only its own nodes need."""
    return importlib.import_module("ray")


def _pool(device: str) -> str:
    """Return Ray's name for the requested devices."""
    has_gpus = _ray().cluster_resources().get("GPU", 0) > 0
    return "GPU" if device == "cuda" or (device == "auto" and has_gpus) else "CPU"


def _shape(asked: AskedDevices, pool: str) -> list[int]:
    """Return bundles that fit the free devices, else all devices of the nodes, else nodes that may still join."""
    state = importlib.import_module("ray._private.state")
    free = [int(node.get(pool, 0)) for node in state.available_resources_per_node().values()]
    total = [int(node["Resources"].get(pool, 0)) for node in _ray().nodes() if node["Alive"]]
    evenly = [math.ceil(asked.ranks / asked.max_hosts)] * asked.max_hosts
    for nodes in (free, total, evenly):
        if (found := bundles(asked.ranks, asked.max_hosts, nodes)) is not None:
            return found
    raise AssertionError("even bundles hold all ranks")


def _reserve(asked: AskedDevices, pool: str) -> tuple[Any, list[int]]:
    """Return a placement group that has got its nodes, and the devices of each bundle."""
    util, tries = importlib.import_module("ray.util"), 0
    while True:
        sizes = _shape(asked, pool)
        group = util.placement_group(
            [{pool: size, **{name: each * size for name, each in asked.extra.items()}} for size in sizes],
            strategy="STRICT_SPREAD" if len(sizes) > 1 else "PACK",
            name=f"{NAME}{asked.token}.{tries}",
        )
        while not group.wait(_LOOK_AGAIN_S):
            if _shape(asked, pool) != sizes:
                util.remove_placement_group(group)
                tries += 1
                break
        else:
            return group, sizes


def _start(asked: AskedDevices, pool: str) -> tuple[list[Any], list[Any]]:
    """Start the command in each bundle; return the actors, and the references that are ready once the commands have
    ended.
    """
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
    facts = {"submission": f"{NAME}{asked.token}", "nodes": ",".join(nodes)}
    kind: Pool = "cuda" if pool == "GPU" else "cpu"
    hosts = [AllocatedHost(asked.token, index, len(sizes), kind, size, facts) for index, size in enumerate(sizes)]
    ended = [
        actor.run.remote(asked.command, asdict(host), asked.log) for actor, host in zip(actors, hosts, strict=True)
    ]
    return actors, ended


def main(arguments: Sequence[str]) -> None:
    """Drive one allocation: return when the command has ended in each bundle, or with its node."""
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
                actor.stop.remote()  # an ended one does not answer


if __name__ == "__main__":
    main(sys.argv[1:])
