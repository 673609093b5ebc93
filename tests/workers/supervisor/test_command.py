"""What torchrun and ranks are started with."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from worker_fleet import train_spec

from service.jobs.records import AttemptRef, Claim, HostShare
from workers import inventory
from workers.agent.celery_app import celery_url, create_app
from workers.supervisor import command
from workers.supervisor.attempt_folder import Rendezvous, interface_of

ENVIRONMENT = {"PATH": "/bin", "HOME": "/root"}
PLACES = command.GroupPaths(Path("/data"), Path("/events"), "s3cret", Path("/scratch"), Path("/compiled"))
GANG = Rendezvous(Path("/shared/rendezvous"), "10.0.0.1", "eth0")
ALONE = Rendezvous(Path("/scratch/rendezvous"), "127.0.0.1", "lo")


def claim(host: str = "b", pool: str = "cuda") -> Claim:
    shares = tuple(HostShare.model_validate({"host": name, "devices": (1, 3), "pool": pool}) for name in ("a", "b"))
    return Claim(AttemptRef("job_1", 2, host), train_spec("x"), shares, "10.0.0.1", 15.0)


def test_every_launcher_of_a_gang_meets_in_the_leaders_folder() -> None:
    arguments = command.torchrun_arguments(claim(), GANG, Path("/scratch"), ("-m", "workers.rank"))
    assert {"--nnodes=2", "--nproc-per-node=2", "--max-restarts=0"} <= set(arguments)
    assert {"--rdzv-backend=folder", "--rdzv-endpoint=/shared/rendezvous"} <= set(arguments)
    assert "--rdzv-conf=host=1,address=10.0.0.1" in arguments
    assert arguments[-2:] == ["-m", "workers.rank"]


def alone(chosen: Mapping[str, str] = ENVIRONMENT, pool: str = "cuda", threads: int = 8) -> dict[str, str]:
    """The environment of the ranks of a job on one host."""
    whole = claim(pool=pool)
    lone = dataclasses.replace(whole, shares=whole.shares[1:])
    return command.rank_environment(lone, ALONE, PLACES, threads=threads, environment=chosen)


def test_ranks_on_one_host_talk_over_loopback_whatever_the_operator_set() -> None:
    chosen = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7", "NCCL_RAS_ENABLE": "1"}
    variables = alone(chosen)
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert variables["NCCL_RAS_ENABLE"] == "0"
    assert variables["TRIVET_RENDEZVOUS"] == "/scratch/rendezvous"


def test_a_gang_talks_over_the_interface_of_its_address_or_the_operators() -> None:
    def gang(chosen: Mapping[str, str]) -> dict[str, str]:
        return command.rank_environment(claim(), GANG, PLACES, threads=8, environment=chosen)

    variables = gang(ENVIRONMENT)
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")
    assert gang({**ENVIRONMENT, "NCCL_SOCKET_IFNAME": "ib0,ib1"})["NCCL_SOCKET_IFNAME"] == "ib0,ib1"


def test_an_address_of_another_host_is_refused_with_those_of_this_one() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"worker_address='192.0.2.1' is not an address of this host; .*127\.0\.0\.1"):
        interface_of("192.0.2.1")


@pytest.mark.parametrize(
    ("outer", "expected"), [(None, "1,3"), ("4,5,6,7", "5,7"), ("GPU-a, GPU-b,GPU-c,GPU-d", "GPU-b,GPU-d")]
)
def test_granted_devices_count_within_what_the_worker_sees(outer: str | None, expected: str) -> None:
    environment = ENVIRONMENT if outer is None else {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": outer}
    variables = alone(environment)
    assert variables["CUDA_VISIBLE_DEVICES"] == expected
    assert variables["OMP_NUM_THREADS"] == "8"


def test_cpu_ranks_see_no_gpu_and_keep_a_chosen_thread_count() -> None:
    chosen = {**ENVIRONMENT, "OMP_NUM_THREADS": "3"}
    variables = alone(chosen, pool="cpu", threads=1)
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert "OMP_NUM_THREADS" not in variables


@pytest.mark.parametrize(
    "name",
    [
        "TRIVET_REDIS_URL",
        "TRIVET_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "DB_PASSWORD",
        "CELERY_BROKER_URL",
        "MY_DATABASE_URL",
        "GITHUB_PAT",
        "SSH_AUTH_SOCK",
        "TORCH_HUB_TOKEN",
        "XPATH",
        "PYTHONSTARTUP",
    ],
)
def test_only_what_is_allowed_reaches_ranks(name: str) -> None:
    assert command.allowed({**ENVIRONMENT, name: "hush"}) == ENVIRONMENT


def test_an_operator_adds_names_but_never_the_services_own() -> None:
    environment = {**ENVIRONMENT, "SCRATCH": "/s", "GITHUB_PAT": "given", "TRIVET_KEY": "hush", "LC_ALL": "C"}
    environment["NCCL_DEBUG"] = "INFO"
    allowed = command.allowed(environment, ("SCRATCH", "GITHUB_PAT", "TRIVET_KEY"))
    assert allowed == {
        **ENVIRONMENT, "SCRATCH": "/s", "GITHUB_PAT": "given", "LC_ALL": "C", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    added = command.rank_environment(claim(), GANG, PLACES, threads=8, environment=environment, more=("SCRATCH",))
    assert added["SCRATCH"] == "/s"
    assert "GITHUB_PAT" not in added


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:pw@host:6379/2", "redis://:pw@host:6379/2"),
        ("rediss://host", "rediss://host"),
        ("unix:///run/x.sock", "redis+socket:///run/x.sock?virtual_host=0"),
        ("unix:///run/x.sock?db=3", "redis+socket:///run/x.sock?virtual_host=3"),
    ],
)
def test_celery_spells_urls_its_own_way(url: str, expected: str) -> None:
    assert celery_url(url) == expected


def test_a_password_on_a_unix_socket_is_refused() -> None:
    with pytest.raises(ValueError, match="unix socket"):
        celery_url("unix://:pw@/run/x.sock")


def test_the_dispatch_wire_takes_json_only_and_never_redelivers() -> None:
    configuration = create_app("redis://host").conf
    assert configuration.accept_content == ["json"]
    assert not configuration.task_acks_late
    assert not configuration.worker_enable_remote_control
    assert not configuration.task_publish_retry


def test_a_host_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise inventory.pynvml.NVMLError(inventory.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(inventory.pynvml, "nvmlInit", absent)
    assert inventory.cuda_devices({}) == ()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, ("gpu 0", "gpu 1", "gpu 2")),
        ("2,0", ("gpu 2", "gpu 0")),
        ("1,7,0", ("gpu 1",)),
        ("GPU-x", ("gpu x",)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: tuple[str, ...]) -> None:
    """The driver's library is replaced: no machine that tests run on has three GPUs for certain."""

    def by_index(index: int) -> str:
        if not 0 <= index < 3:
            raise inventory.pynvml.NVMLError(inventory.pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return str(index)

    fakes = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid.removeprefix("GPU-"),
        "nvmlDeviceGetName": lambda handle: f"gpu {handle}",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(inventory.pynvml, name, fake)
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert inventory.cuda_devices(environment) == expected


def test_ranks_on_all_devices_of_a_host_have_a_core_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "usable_cores", lambda: 16)
    assert [inventory.threads_of_a_rank(devices) for devices in (1, 4, 16, 64)] == [16, 4, 1, 1]


def test_a_containers_quota_of_cores_is_seen(tmp_path: Path) -> None:
    assert inventory._quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert inventory._quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert inventory._quota(tmp_path) == 2.5


def test_cpu_slots_default_to_the_usable_cores_but_hold_a_small_mesh() -> None:
    assert inventory.cpu_slots(None) == max(4, inventory.usable_cores())
    assert inventory.cpu_slots(0) == 0


def test_a_launcher_begins_before_its_supervisor_imports_what_takes_long() -> None:
    """Both import for about a second each: side by side, not one after the other."""
    code = "import sys, workers.supervisor.program; print(sorted({'pydantic', 'redis', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
