"""``trivet worker --join``: an invitation is tried at once, kept privately, and refused with what to change."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import Cli
from network_broker import PASSWORDS, NetworkBroker, network_broker

from service.jobs.files import DataLayout
from service.jobs.records.store_limits import StoreLimits
from service.jobs.settings import Invitation, NoInvitation, Settings
from service.jobs.store import HostReport, Store
from trivet.joining import CannotJoin, join


@pytest.fixture
def fleet_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NetworkBroker]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TRIVET_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("TRIVET_WORKER_NAME", raising=False)
    (tmp_path / "data" / "hosts" / "alpha").mkdir(parents=True)
    (tmp_path / "broker").mkdir()
    with network_broker(tmp_path / "broker") as broker:
        yield broker


def invitation(broker: NetworkBroker, user: str = "host-gpu.1", **changes: str) -> Invitation:
    fields = {"url": f"redis://127.0.0.1:{broker.port}/0", "password": PASSWORDS[user], **changes}
    return Invitation(user=user, **fields)


def test_an_invitation_makes_settings_of_a_worker_whose_password_is_in_a_private_file(
    fleet_broker: NetworkBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invited = invitation(fleet_broker)
    variables = join(Invitation.read(str(invited)))
    assert invited.password not in str(variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert (settings.broker_url, settings.worker_name) == (fleet_broker.url("host-gpu.1"), "gpu.1")
    kept = Path(variables["TRIVET_BROKER_PASSWORD_FILE"])
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


def test_what_does_not_let_a_host_join_is_said(fleet_broker: NetworkBroker, tmp_path: Path) -> None:
    with pytest.raises(CannotJoin, match="ask for a new invitation"):
        join(invitation(fleet_broker, password="wrong" * 8))
    store = Store.connect(fleet_broker.url("host"), DataLayout(tmp_path / "data"), StoreLimits())
    store.hosts.beat(HostReport("alpha", "127.0.0.1", cpu_slots=1))
    join(invitation(fleet_broker))
    store.hosts.beat(HostReport("beta", "127.0.0.1", cpu_slots=1))
    store.close()
    with pytest.raises(CannotJoin, match=r"has nothing of host beta. Mount the folder .* TRIVET_DATA"):
        join(invitation(fleet_broker))
    fleet_broker.admin.config_set("port", 0)
    with pytest.raises(CannotJoin, match=r"does not answer.*open its port to this host"):
        join(invitation(fleet_broker))


def test_what_is_no_invitation_is_refused_without_repeating_it() -> None:
    whole = str(Invitation("rediss://broker:6379/0", "host", "p" * 32, "PEM"))
    assert Invitation.read(f" {whole}\n").ca_cert == "PEM"
    for text in ("", "abc", whole[1:], whole.partition("@")[0], whole.replace("rediss", "http")):
        with pytest.raises(NoInvitation) as refusal:
            Invitation.read(text)
        assert "p" * 32 not in str(refusal.value)
        assert not text or text not in str(refusal.value)


@pytest.mark.parametrize("url", ["unix:///broker.sock", "redis://host:secret@broker:6379/0", "http://broker"])
def test_an_address_that_no_host_can_use_is_not_given_out(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Invitation(url, "host", "p" * 32)


def test_an_operator_invites_a_host_that_has_a_password(trivet: Cli, tmp_path: Path) -> None:
    folder = str(tmp_path / "passwords")
    trivet.ok("broker", "acl", folder, "--add", "api", "--add", "host-a")
    said = trivet.ok("broker", "invite", folder, "host-a", "redis://broker:6379/0").out
    assert Invitation.read(said).password == (tmp_path / "passwords" / "host-a").read_text().strip()
    for user, why in (("host-b", "--add host-b"), ("api", "not a host's user"), ("root", "not a user of the broker")):
        ran = trivet("broker", "invite", folder, user, "redis://broker:6379/0")
        assert (ran.code, ran.out) == (2, "")
        assert why in " ".join(ran.err.split())


@pytest.mark.slow
def test_a_worker_does_not_start_with_what_is_no_invitation() -> None:
    command = [sys.executable, "-m", "trivet", "worker", "--join", "-"]
    ran = subprocess.run(command, input="nonsense", text=True, capture_output=True, env=os.environ, check=False)
    assert ran.returncode == 2
    assert "trivet broker invite" in ran.stderr
