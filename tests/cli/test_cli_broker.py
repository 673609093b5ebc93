"""``trivet broker``: the access list of a deployment's broker, made of a folder of passwords."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import redis as redis_py
from cli_world import Cli
from network_broker import network_broker


def test_passwords_are_made_once_and_the_list_admits_them(trivet: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "passwords"
    listed = trivet.ok("broker", "acl", str(folder), "--add", "api", "--add", "host-a").out
    made = {path.name: path.read_text().strip() for path in folder.iterdir()}
    assert (sorted(made), stat.S_IMODE(folder.stat().st_mode)) == (["api", "host-a"], 0o700)
    assert not any(password in listed for password in made.values())
    trivet.ok("broker", "acl", str(folder), "--add", "api", "--output", str(tmp_path / "users.acl"))
    assert (tmp_path / "users.acl").read_text() == listed
    (tmp_path / "broker").mkdir()
    with network_broker(tmp_path / "broker", (tmp_path / "users.acl").read_text()) as broker:
        for user, password in made.items():
            with redis_py.Redis(port=broker.port, username=user, password=password) as client:
                assert client.ping()


@pytest.mark.slow
def test_what_is_wrong_with_a_folder_of_passwords_is_said(trivet: Cli, tmp_path: Path) -> None:
    (tmp_path / "api").write_text("short")
    (tmp_path / "host").write_text("b" * 40)
    for words, said in (
        ((), "the password of api must have 32 characters"),
        (("--add", "root"), "'root' is not a user of the broker"),
        (("--output", str(tmp_path / "no" / "where")), "the password of api"),
    ):
        ran = trivet("broker", "acl", str(tmp_path), *words)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err
    assert "nowhere" in trivet("broker", "acl", str(tmp_path / "nowhere")).err
