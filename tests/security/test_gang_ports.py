"""The ranks of a gang over hosts listen on their host's configured address, and run nothing a stranger sends (B1)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sockets import listeners, payload
from waiting import eventually
from worker_fleet import SUPERVISOR, Fleet, family, train_spec

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
    marker, reached = tmp_path / "owned", False
    until = time.monotonic() + 6
    while time.monotonic() < until and not marker.exists():
        for each in seen:
            reached |= _attack_from(networks["beta"], each.address, each.port, payload(marker), f"{job.id}-1")
    fleet.store.jobs.cancel(job.id)
    eventually(lambda: fleet.store.jobs.get(job.id).ended_at)
    assert reached
    assert not marker.exists()


def _attack_from(network: str, address: str, port: int, content: bytes, run_id: str) -> bool:
    """Return whether the port took it."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from sockets import attack; "
        f"print(attack({address!r}, {port}, bytes.fromhex({content.hex()!r}), {run_id!r}))"
    )
    command = ["ip", "netns", "exec", network, sys.executable, "-c", code]
    return subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE).stdout == b"True\n"
