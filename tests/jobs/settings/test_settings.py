"""Settings come from the environment, then a file, then defaults; and can be listed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from service.jobs.host import ENV_PREFIX
from service.jobs.settings import Settings, describe, unknown_variables
from service.jobs.settings.broker_url import BrokerIdentity, broker_url
from service.jobs.store import StoreLimits

NOT_CHOSEN = {
    "forget_host_s", "idem_ttl_s", "least_stream_bytes", "list_most", "list_page_bytes", "list_scan", "made_room_s",
    "objects", "project_stream_bytes", "redispatch_s", "stream_bytes", "stream_cap",
}  # fmt: skip
"""Limits without a setting of their name; an operator chooses `objects` as `store`."""


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
        ("job_file_gib = inf", "job_file_gib"),
        ("job_memory_gib = inf", "job_memory_gib"),
        ("check_memory_gib = inf", "check_memory_gib"),
        ("keep_uploads_days = 1e7", "keep_uploads_days"),
        ("session_s = inf", "session_s"),
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


def test_a_variable_that_is_no_setting_is_told(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_MAX_FILE_BYTE", "2048")
    monkeypatch.setenv("TRIVET_CONFIG", "settings.toml")
    (told,) = unknown_variables()
    assert told == "TRIVET_MAX_FILE_BYTE is no setting; did you mean TRIVET_MAX_FILE_BYTES?"


def test_the_store_obeys_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_LEASE_S", "7.5")
    monkeypatch.setenv("TRIVET_MAX_FILE_BYTES", "2048")
    limits = Settings().store_limits
    assert (limits.lease_s, limits.max_file_bytes, limits.heartbeat_s) == (7.5, 2048, 10.0)
    assert '"lease_ms":7500' in limits.script_argument
    monkeypatch.delenv("TRIVET_LEASE_S")
    monkeypatch.delenv("TRIVET_MAX_FILE_BYTES")
    assert Settings().store_limits == StoreLimits()


def test_every_limit_that_has_a_setting_follows_it() -> None:
    chosen = Settings.model_validate(
        {
            "store": "s3://bucket/x",
            "max_key_days": 30,
            "keep_uploads_days": 0,
            "default_quotas": "devices=8, queued_jobs=9",
        }
    )
    limits = chosen.store_limits
    assert (limits.objects, limits.max_key_days, limits.keep_uploads_days) == ("s3://bucket/x", 30, None)
    assert limits.default_quotas == "devices=8, queued_jobs=9"
    assert {field.name for field in fields(StoreLimits)} - set(Settings.model_fields) == NOT_CHOSEN


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device=8", "'device' is no quota"),
        ("devices=many", "devices=many: Input should be a valid integer"),
        ("devices=1,devices=2", "'devices' is no quota, or is given twice"),
        ("longest_time_s=1,default_time_s=2", "default_time_s=2 is beyond longest_time_s=1"),
    ],
)
def test_a_default_quota_that_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as refused:
        Settings.model_validate({"default_quotas": text})
    assert refused.value.errors()[0]["loc"] == ("default_quotas",)


def test_a_password_of_the_broker_is_taken_as_it_is(bare: Path) -> None:
    """From a file or a setting, whatever characters it has, and in place of one in the address."""
    (bare / "password").write_text("a/b#c?d@e%f:g\n")
    fields = {"redis_url": "redis://:old@broker:6379/0", "broker_user": "api"}
    settings = Settings.model_validate(fields | {"broker_password_file": bare / "password"})
    assert settings.broker_url == "redis://api:a%2Fb%23c%3Fd%40e%25f%3Ag@broker:6379/0"
    assert Settings.model_validate(fields | {"broker_password": "a#b"}).broker_url == "redis://api:a%23b@broker:6379/0"
    assert Settings.model_validate(fields).broker_url == "redis://api:old@broker:6379/0"


@given(user=st.text(min_size=1), password=st.text(min_size=1))
def test_user_and_password_come_back_out_of_the_address(user: str, password: str) -> None:
    parts = urlsplit(broker_url("redis://broker:6379/1", BrokerIdentity(user, password)))
    assert (unquote(parts.username or ""), unquote(parts.password or "")) == (user, password)
    assert (parts.hostname, parts.port, parts.path) == ("broker", 6379, "/1")


def test_a_password_file_that_is_not_there_is_named(bare: Path) -> None:
    settings = Settings.model_validate({"redis_url": "redis://broker", "broker_password_file": bare / "nowhere"})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        _ = settings.broker_url


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"redis_url": "http://broker"}, "begins with redis://"),
        ({"redis_url": "redis://:pass#word@broker:6379/0"}, "TRIVET_BROKER_PASSWORD_FILE"),
        ({"redis_url": "redis://:pass/word@broker:6379/0"}, "TRIVET_BROKER_PASSWORD_FILE"),
        ({"redis_url": "redis://"}, "TRIVET_BROKER_PASSWORD_FILE"),
        ({"redis_url": "rediss://broker?ssl_cert_reqs=none"}, "always verified"),
        ({"redis_url": "rediss://broker?ssl_check_hostname=false"}, "always verified"),
        ({"redis_url": "redis://broker", "broker_ca_cert": "ca.pem"}, "need a rediss:// address"),
        ({"redis_url": "rediss://broker", "broker_tls_cert": "c.pem"}, "come together"),
        ({"redis_url": "redis://b", "broker_password": "p", "broker_password_file": "f"}, "exclude each other"),
    ],
)
def test_an_address_of_the_broker_that_cannot_be_meant_is_refused(fields: dict[str, str], said: str) -> None:
    with pytest.raises(ValidationError, match=said) as refused:
        Settings.model_validate(fields)
    assert not any(part in str(refused.value) for part in ("pass#", "pass/", "word@"))
