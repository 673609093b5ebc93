"""Settings come from the environment, then a file, then defaults; and can be listed."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from service.jobs.settings import ENV_PREFIX, Settings, describe
from service.jobs.store import StoreLimits


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No setting of the machine that runs the tests is seen."""
    import os

    for name in list(os.environ):
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults_are_private(bare: Path) -> None:
    settings = Settings()
    assert settings.host == "127.0.0.1"
    assert settings.layout.root == bare / ".trivet"
    assert settings.broker_url == f"unix://{bare}/.trivet/broker/broker.sock"


def test_the_environment_wins_over_the_file(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "other.toml").write_text('port = 1\nlease_s = 2.5\nredis_url = "redis://elsewhere"\n')
    monkeypatch.setenv("TRIVET_CONFIG", str(bare / "other.toml"))
    monkeypatch.setenv("TRIVET_PORT", "2")
    settings = Settings()
    assert (settings.port, settings.lease_s, settings.broker_url) == (2, 2.5, "redis://elsewhere")
    sources = {line.name: (line.variable, line.source) for line in describe(settings)}
    assert sources["port"] == ("TRIVET_PORT", "environment")
    assert sources["lease_s"] == ("TRIVET_LEASE_S", str(bare / "other.toml"))
    assert sources["host"] == ("TRIVET_HOST", "default")


def test_a_file_in_the_working_folder_is_used(bare: Path) -> None:
    (bare / "trivet.toml").write_text("heartbeat_s = 3\n")
    assert Settings().heartbeat_s == 3


def test_a_file_that_is_named_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_CONFIG", "nowhere.toml")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml"):
        Settings()


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("port = 70000", "port"),
        ("lease_s = 0", "lease_s"),
        ("lease_s = inf", "lease_s"),
        ("lease_s = 1e9", "lease_s"),
        ("prot = 1", "prot"),
        ('log_level = "loud"', "log_level"),
    ],
)
def test_bad_settings_name_the_field(bare: Path, line: str, field: str) -> None:
    (bare / "trivet.toml").write_text(line + "\n")
    with pytest.raises(ValidationError, match=field):
        Settings()


def test_every_setting_is_listed_with_a_description_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_REDIS_URL", "redis://user:hunter2@host")
    lines = describe(Settings())
    assert [line.name for line in lines] == list(Settings.model_fields)
    assert all(line.description and line.variable == f"TRIVET_{line.name.upper()}" for line in lines)
    assert "hunter2" not in repr(lines)


def test_the_store_obeys_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_LEASE_S", "7.5")
    monkeypatch.setenv("TRIVET_MAX_FILE_BYTES", "2048")
    limits = Settings().store_limits
    assert (limits.lease_s, limits.max_file_bytes, limits.heartbeat_s) == (7.5, 2048, 10.0)
    assert '"lease_ms":7500' in limits.script_argument
    monkeypatch.delenv("TRIVET_LEASE_S")
    monkeypatch.delenv("TRIVET_MAX_FILE_BYTES")
    assert Settings().store_limits == StoreLimits()
