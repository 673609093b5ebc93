"""The folder in which a group meets is for its members only (B1)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from worker_fleet import train_spec

from service.jobs.records import AttemptRef, Claim, HostShare
from service.jobs.runtime import RendezvousError, rendezvous_folder
from workers.supervisor.attempt_folder import agree


def test_the_folder_is_private_and_its_secret_new_each_time(tmp_path: Path) -> None:
    folder = rendezvous_folder.make(tmp_path / "rendezvous")
    first = rendezvous_folder.secret(folder)
    assert len(first) == 32
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (folder / "ranks").write_text("left by an attempt that had this number")
    assert rendezvous_folder.secret(rendezvous_folder.make(folder)) != first
    assert [each.name for each in tmp_path.iterdir()] == ["rendezvous"]
    assert not (folder / "ranks").exists()


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = rendezvous_folder.make(tmp_path / "rendezvous")
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(RendezvousError, match="expected a folder of user"):
        rendezvous_folder.check(link)
    folder.chmod(0o711)
    with pytest.raises(RendezvousError, match="drwx--x--x"):
        rendezvous_folder.secret(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = rendezvous_folder.make(tmp_path / "rendezvous")
    os.chown(folder, 65534, 65534)
    with pytest.raises(RendezvousError, match="owner 65534; expected a folder of user 0"):
        rendezvous_folder.check(folder)


def gang(host: str) -> Claim:
    shares = tuple(HostShare.model_validate({"host": name, "devices": (0,)}) for name in ("a", "b"))
    return Claim(AttemptRef("job_1", 1, host), train_spec("x", ranks=2), shares, "127.0.0.1", 15.0)


def test_a_gang_meets_in_the_leaders_private_folder(tmp_path: Path) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(
            *(agree(gang(host), tmp_path, tmp_path / host, "127.0.0.1", within_s=300) for host in ("b", "a"))
        )

    follower, leader = asyncio.run(both())
    assert follower == leader
    assert leader.folder == tmp_path / "rendezvous"


def test_a_follower_waits_for_its_leader_no_longer_than_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(agree(gang("b"), tmp_path, tmp_path, "127.0.0.1", within_s=0.0))


def test_a_follower_refuses_a_folder_that_another_user_could_have_made(tmp_path: Path) -> None:
    (tmp_path / "rendezvous").mkdir(mode=0o755)
    (tmp_path / "rendezvous").chmod(0o755)
    with pytest.raises(RendezvousError):
        asyncio.run(agree(gang("b"), tmp_path, tmp_path, "127.0.0.1", within_s=5))


def test_a_job_on_one_host_meets_where_no_other_host_looks(tmp_path: Path) -> None:
    alone = dataclasses.replace(gang("b"), shares=gang("b").shares[1:])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    meeting = asyncio.run(agree(alone, tmp_path, scratch, "192.0.2.1"))
    assert (meeting.folder, meeting.address, meeting.interface) == (scratch / "rendezvous", "127.0.0.1", "lo")
