"""The ranks of a gang over hosts listen on their host's configured address, and run nothing a stranger sends (B1)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sockets import listeners, payload
from waiting import eventually
from worker_fleet import SHORT_LEASES, SUPERVISOR, Fleet, family, train_spec

from service.jobs.records import AttemptRef
from service.jobs.store import HostReport

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="hosts with networks of their own need root and `ip`"
    ),
]
ADDRESSES = {"alpha": "10.77.3.1", "beta": "10.77.3.2"}
READS_WITHIN_S = 6.0
"""Torch's own rendezvous reads its state every five seconds."""


@pytest.fixture
def networks() -> Iterator[dict[str, str]]:
    """Network namespaces, by host, that are linked; each host has an address that no job was told of, too."""
    names = {host: f"trivet-{host}-{os.getpid()}" for host in ADDRESSES}
    links = {host: f"tv{index}{os.getpid()}" for index, host in enumerate(ADDRESSES)}

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names.values():
            ip("netns", "add", name)
        ip("link", "add", links["alpha"], "type", "veth", "peer", "name", links["beta"])
        for index, (host, name) in enumerate(names.items()):
            ip("link", "set", links[host], "netns", name)
            for device, address in ((links[host], ADDRESSES[host]), ("lo", f"10.78.{index}.1")):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine forbids what makes hosts out of namespaces: {error.stderr}")
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["told soon"])
def test_a_gang_listens_on_its_configured_address_and_unpickles_no_strangers_bytes(
    fleet: Fleet, networks: dict[str, str], tmp_path: Path
) -> None:
    for host, address in ADDRESSES.items():
        fleet.store.hosts.beat(HostReport(host, address, cpu_slots=1))
    fleet.slots = 1
    job, _ = fleet.store.jobs.submit(train_spec("exchange", ranks=2, max_hosts=2), "tester")
    assert fleet.store.attempts.place() == [job.id]
    refs = {host: AttemptRef(job.id, 1, host) for host in ADDRESSES}
    supervisors = [
        fleet.supervise(ref, command=("ip", "netns", "exec", networks[host], *SUPERVISOR), address=ADDRESSES[host])
        for host, ref in refs.items()
    ]
    eventually(lambda: fleet.events(refs["alpha"], "metric"))
    seen = set()
    for supervisor in supervisors:
        seen |= set(listeners([psutil.Process(supervisor.pid), *family(supervisor)]))
    assert {each.address for each in seen} == set(ADDRESSES.values()), seen
    marker = tmp_path / "owned"
    ports = [(each.address, each.port) for each in seen]
    reached = _attack_from(networks["beta"], ports, payload(marker), f"{job.id}-1")
    fleet.store.jobs.cancel(job.id)
    eventually(lambda: fleet.store.jobs.get(job.id).ended_at)
    assert reached
    assert not marker.exists()


def _attack_from(network: str, ports: list[tuple[str, int]], content: bytes, run_id: str) -> bool:
    """Attack for as long as torch's own rendezvous takes to read its state; return whether a port took anything."""
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from sockets import attack
until, reached = time.monotonic() + {READS_WITHIN_S}, False
while time.monotonic() < until:
    for address, port in {ports!r}:
        reached |= attack(address, port, bytes.fromhex({content.hex()!r}), {run_id!r})
    time.sleep(0.1)
print(reached)
"""
    command = ["ip", "netns", "exec", network, sys.executable, "-c", code]
    return subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE).stdout == b"True\n"
