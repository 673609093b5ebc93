"""What is deployed on Kubernetes is what its published schemas allow, and its parts agree with each other."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.jobs.host import ENV_PREFIX
from service.jobs.settings import Settings

schemas = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate: pip install 'trivet[dev]'")

DOCKER = Path(__file__).parents[2] / "docker"
VERSIONS = ("1.30", "1.37")
"""The oldest that the launcher needs, and the newest that is known."""
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for path in sorted((DOCKER / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]


def called(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}-{manifest['metadata'].get('name', 'attempt')}"


def pods(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what each of them says of its pods."""
    for manifest in manifests:
        if "template" in manifest.get("spec", {}):
            yield manifest["spec"]["template"]["spec"]


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for pod in pods(MANIFESTS):
        yield from ((pod, container) for container in (*pod.get("initContainers", []), *pod["containers"]))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=called)
def test_a_manifest_is_what_the_published_schemas_allow(manifest: dict[str, Any], version: str) -> None:
    if manifest["kind"] == "Job":  # a template, to which the launcher adds this
        manifest = yaml.safe_load(yaml.safe_dump(manifest))
        manifest["spec"]["template"]["spec"]["restartPolicy"] = "Never"
    schemas.validate(manifest, version, strict=True)


def test_every_container_is_confined_and_mounts_what_its_pod_has() -> None:
    for pod, container in containers():
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"]
        assert not confined["allowPrivilegeEscalation"]
        assert confined["capabilities"] == {"drop": ["ALL"]}
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {mount["name"] for mount in container["volumeMounts"]} <= {
            volume["name"] for volume in pod["volumes"]
        } | {
            "broker"  # of the set's claims
        }


def test_settings_are_those_of_the_service_and_no_password_is_among_them() -> None:
    for _, container in containers():
        for entry in container.get("env", []):
            assert entry["name"].removeprefix(ENV_PREFIX).lower() in Settings.model_fields
            assert "PASSWORD" not in entry["name"] or entry["name"].endswith("_FILE")


def test_only_the_api_has_the_admin_key() -> None:
    holders = {
        claim["claimName"]
        for pod in pods([one for one in MANIFESTS if called(one) != "Deployment-api"])
        for volume in pod["volumes"]
        if (claim := volume.get("persistentVolumeClaim"))
    }
    assert holders == {"trivet-data"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which has kustomize, is not installed")
def test_kustomize_makes_a_whole_of_it(tmp_path: Path) -> None:
    copy = tmp_path / "docker"
    copy.mkdir()
    for name in ("kustomization.yaml", "broker.conf"):
        shutil.copy(DOCKER / name, copy)
    shutil.copytree(DOCKER / "kubernetes", copy / "kubernetes")
    (copy / "secrets").mkdir()
    for user in ("api", "host"):
        (copy / "secrets" / user).write_text("a" * 64)
    built = subprocess.run(["kubectl", "kustomize", copy], capture_output=True, text=True, check=True).stdout
    manifests = list(yaml.safe_load_all(built))
    for manifest in manifests:
        schemas.validate(manifest, VERSIONS[0], strict=True)
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "trivet"
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    (attempt,) = [
        yaml.safe_load(one["data"]["attempt.yaml"]) for one in manifests if "attempt.yaml" in one.get("data", {})
    ]
    for pod in pods([*manifests, attempt]):
        for volume in pod["volumes"]:
            for kind, key in (("Secret", "secretName"), ("ConfigMap", "name"), ("PersistentVolumeClaim", "claimName")):
                field = kind[0].lower() + kind[1:]
                assert field not in volume or (kind, volume[field][key]) in names
