"""Answers as the API server of Kubernetes does about Jobs and pods, over HTTP, and runs what pods run as processes.

What it is sent must be what the published schemas of Kubernetes allow, in their strict form. It does what the
controller of indexed Jobs and Kueue do with a Job: a suspended one waits for :meth:`FakeKubernetes.admit`, the pods of
others start at once where there is room, and a Job ends with its pods, or fails with the first that does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

SCHEMAS = "1.34"
TOKEN = "a-token-of-a-service-account"
_PATH = re.compile(
    r"/(?:api/v1|apis/batch/v1)/namespaces/(?P<namespace>[^/]+)/(?P<kind>jobs|pods)(?:/(?P<name>[^/]+))?"
)


@dataclass
class FakeJob:
    """A Job, and the processes of its pods once it has been admitted."""

    manifest: dict[str, Any]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def status(self) -> dict[str, Any]:
        codes = [process.poll() for process in self.processes]
        running, succeeded = codes.count(None), codes.count(0)
        failed = len(codes) - running - succeeded
        ended = "Failed" if failed else "Complete" if codes and not running else None
        condition = {"type": ended, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        return {
            "active": running,
            "ready": running,
            "succeeded": succeeded,
            "failed": failed,
            "conditions": [condition] if ended else [],
        }

    def start(self, log: Path) -> None:
        """Start each pod's container, which knows its index as Kubernetes tells it."""
        container = self.manifest["spec"]["template"]["spec"]["containers"][0]
        plain = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}
        given = {entry["name"]: entry["value"] for entry in container["env"]}
        for index in range(self.manifest["spec"]["completions"]):
            own = {"JOB_COMPLETION_INDEX": str(index)}
            with log.open("ab") as printed:
                self.processes.append(
                    subprocess.Popen(
                        container["command"],
                        env={**plain, **given, **own},
                        stdin=subprocess.DEVNULL,
                        stdout=printed,
                        stderr=printed,
                        start_new_session=True,
                    )
                )

    def end(self) -> None:
        """Stop pods as the kubelet does: SIGTERM, and SIGKILL after the grace of the pod."""
        for process in self.processes:
            process.terminate()
        grace_s = self.manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for process in self.processes:
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class FakeKubernetes:
    """One namespace, ``lab``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs, self.requests = folder, dict[str, FakeJob](), list[tuple[str, str]]()
        self.has_room = True
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": self}))
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.config = folder / "kubeconfig"
        self.config.write_text(json.dumps(self._config(TOKEN)))
        self.strangers_config = folder / "strangers-kubeconfig"
        self.strangers_config.write_text(json.dumps(self._config("another")))

    def _config(self, token: str) -> dict[str, Any]:
        address = f"http://127.0.0.1:{self._server.server_port}"
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "trivet"}}],
            "clusters": [{"name": "here", "cluster": {"server": address}}],
            "users": [{"name": "trivet", "user": {"token": token}}],
        }

    def admit(self, name: str) -> None:
        """As Kueue does once there is room for a Job."""
        with self.lock:
            job = self.jobs[name]
            job.manifest["spec"]["suspend"] = False
            job.start(self.folder / "pods.log")

    def suspend(self, name: str) -> None:
        """As Kueue does with a Job that another one of higher priority takes the room of: its pods end."""
        with self.lock:
            job = self.jobs[name]
            job.manifest["spec"]["suspend"] = True
            processes, job.processes = job.processes, []
            FakeJob(job.manifest, processes).end()

    def names(self) -> list[str]:
        with self.lock:
            return list(self.jobs)

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        kubernetes_validate.validate(manifest, SCHEMAS, strict=True)
        job = FakeJob(manifest)
        with self.lock:
            self.jobs[manifest["metadata"]["name"]] = job
            if not manifest["spec"].get("suspend") and self.has_room:
                job.start(self.folder / "pods.log")
        return manifest

    def delete(self, name: str) -> bool:
        """Delete a Job, and its pods in the background."""
        with self.lock:
            job = self.jobs.pop(name, None)
        if job is not None:
            threading.Thread(target=job.end).start()
        return job is not None

    def listed(self, kind: str, selector: str) -> list[dict[str, Any]]:
        wanted = dict(part.split("=") for part in selector.split(","))
        with self.lock:
            jobs = [job for job in self.jobs.values() if wanted.items() <= job.manifest["metadata"]["labels"].items()]
        if kind == "jobs":
            return [{**job.manifest, "status": job.status} for job in jobs]
        condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: insufficient cpu"}
        return [
            {
                "metadata": {"name": "pod", "labels": job.manifest["spec"]["template"]["metadata"]["labels"]},
                "spec": job.manifest["spec"]["template"]["spec"],
                "status": {"phase": "Pending", "conditions": [condition]},
            }
            for job in jobs
            if not job.processes
        ]

    def clear(self) -> None:
        """Delete all Jobs, those too that are over."""
        for name in self.names():
            self.delete(name)

    def close(self) -> None:
        """End all pods and the server; what is closed already stays so."""
        self.clear()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Serves one connection."""

    cluster: FakeKubernetes
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def log_message(self, *_: object) -> None:
        """Say nothing: what is asked is recorded."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        self.cluster.requests.append((self.command, parts.path))
        found = _PATH.fullmatch(parts.path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "Unauthorized")
        elif found is None or found["namespace"] != "lab":
            self._refuse(403, f"{parts.path} is forbidden")
        elif self.command == "GET":
            items = self.cluster.listed(found["kind"], parse_qs(parts.query)["labelSelector"][0])
            kind, version = ("JobList", "batch/v1") if found["kind"] == "jobs" else ("PodList", "v1")
            self._answer(200, {"kind": kind, "apiVersion": version, "metadata": {}, "items": items})
        elif self.command == "POST":
            try:
                self._answer(201, self.cluster.create(json.loads(body)))
            except kubernetes_validate.ValidationError as error:
                self._refuse(422, error.message)
        elif self.cluster.delete(found["name"]):
            self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})
        else:
            self._refuse(404, f'jobs.batch "{found["name"]}" not found')

    def _refuse(self, code: int, message: str) -> None:
        self._answer(
            code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
        )

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        with contextlib.suppress(OSError):  # the client has gone
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
