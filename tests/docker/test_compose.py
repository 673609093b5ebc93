"""What is deployed: the files that start it agree with the settings and with each other, and keep passwords to
themselves."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
import yaml
from network_broker import PASSWORDS
from waiting import eventually

from api.front.middleware import is_known, known_names
from service.jobs.host import ENV_PREFIX
from service.jobs.host.embedded_broker import find_server
from service.jobs.monitoring.catalogue import METRICS
from service.jobs.settings import Settings
from service.jobs.store.acl import access_list
from workers.agent.agent import AgentSettings

ROOT = Path(__file__).parents[2]
COMPOSED: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSED["services"]
METRIC = re.compile(r"\btrivet_\w+")


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["logging"]["options"]["max-size"]


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if service["restart"] != "no"])
def test_what_goes_on_has_limits(name: str) -> None:
    assert SERVICES[name]["pids_limit"] > 0
    assert SERVICES[name]["mem_limit"]


@pytest.mark.parametrize("name", ["worker", "worker-gpu"])
def test_a_worker_has_time_to_give_its_jobs_back_and_neither_key_nor_name_of_another(name: str) -> None:
    service = SERVICES[name]
    fields = Settings.model_fields
    needed_s = fields["stop_grace_s"].default + AgentSettings.report_within_s
    assert int(service["stop_grace_period"].removesuffix("s")) > 2 * needed_s
    assert service["volumes"] == ["data:/data"]
    assert "TRIVET_WORKER_NAME" not in service["environment"]
    told = (ROOT / "docker" / "Dockerfile").read_text()
    api, worker = told.split("AS worker")
    key = re.search(r"TRIVET_ADMIN_KEY_FILE=(\S+)", api)
    assert key is not None
    assert any(key[1].startswith(each.partition(":")[2] + "/") for each in SERVICES["api"]["volumes"])
    assert "TRIVET_STOP_JOBS=true" in worker


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_given_settings_that_exist_and_the_password_of_its_own_user_in_a_file(name: str) -> None:
    service = SERVICES[name]
    variables = service.get("environment", {})
    own = [each for each in variables if each.startswith(ENV_PREFIX)]
    assert [each for each in own if each.removeprefix(ENV_PREFIX).lower() not in Settings.model_fields] == []
    assert not re.search("password=|requirepass|://[^@]*:[^@]*@", str(service))
    secrets = {each["source"]: each["target"] for each in service.get("secrets", ())}
    user = variables.get("TRIVET_BROKER_USER")
    if user is not None:
        assert secrets == {f"broker-{user}": Path(variables["TRIVET_BROKER_PASSWORD_FILE"]).name}


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    """And Grafana finds it, and its source, where they are mounted."""
    folder = ROOT / "docker" / "grafana"
    board = json.loads((folder / "dashboards" / "trivet.json").read_text())
    shown = {name for panel in board["panels"] for each in panel["targets"] for name in METRIC.findall(each["expr"])}
    assert shown
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in shown} <= {metric.name for metric in METRICS}
    source = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"][0]["uid"]
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source}
    provider = yaml.safe_load((folder / "dashboards" / "provider.yml").read_text())["providers"][0]
    assert "./docker/grafana:/etc/grafana/provisioning:ro" in SERVICES["grafana"]["volumes"]
    assert provider["options"]["path"] == "/etc/grafana/provisioning/dashboards"


def test_the_api_answers_to_the_name_by_which_prometheus_scrapes_it() -> None:
    scraped = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    told = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", SERVICES["api"]["environment"]["TRIVET_ALLOWED_HOSTS"])
    names = known_names(Settings(host="0.0.0.0", allowed_hosts=told))
    assert all(is_known(target, names) for each in scraped[0]["static_configs"] for target in each["targets"])


def test_tls_on_top_is_given_to_everyone_who_speaks_to_the_broker() -> None:
    added: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.tls.yml").read_text())
    speaking = {name for name, service in SERVICES.items() if "TRIVET_REDIS_URL" in service.get("environment", {})}
    assert added["services"].keys() == speaking | {"broker"}
    for name in speaking:
        variables = added["services"][name]["environment"]
        assert variables["TRIVET_REDIS_URL"].startswith("rediss://broker:")
        assert variables.keys() <= {f"{ENV_PREFIX}{field.upper()}" for field in Settings.model_fields}
    named = re.findall(r"/run/secrets/([\w-]+)", str(added))
    assert set(named) == added["secrets"].keys()
    assert {"--tls-port", "--port", "0"} <= set(added["services"]["broker"]["command"])


def test_the_broker_reads_its_configuration_and_admits_the_users(tmp_path: Path) -> None:
    """Every line of the file; only where things are is another place here."""
    configured = (ROOT / "docker" / "broker.conf").read_text()
    for path, here in (("/users/users.acl", "users.acl"), ("/data", "."), ("port 6379", "port 0\nunixsocket s.sock")):
        assert path in configured
        configured = configured.replace(path, here)
    (tmp_path / "broker.conf").write_text(configured)
    (tmp_path / "users.acl").write_text(access_list(PASSWORDS))
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([find_server(), "broker.conf"], cwd=tmp_path, stdout=log, stderr=log)
    try:
        for user, password in {**PASSWORDS, "probe": "any"}.items():
            client = redis_py.Redis(unix_socket_path=str(tmp_path / "s.sock"), username=user, password=password)
            eventually(lambda client=client: _answers(client, server))
            client.close()
    finally:
        server.kill()
        server.wait()
    assert SERVICES["users"]["command"][-1] == "/users/users.acl"


def _answers(client: redis_py.Redis, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "the server ended"
    try:
        return bool(client.ping())
    except redis_py.AuthenticationError:
        raise
    except redis_py.ConnectionError:
        return False
