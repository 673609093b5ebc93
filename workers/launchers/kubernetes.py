"""Gets devices from Kubernetes: one indexed Job for each attempt, with one pod per host, in a queue of Kueue's if one
is named.

The operator's template of a Job describes a pod, as in ``docker/kubernetes/attempt.yaml``; the launcher fills in the
command, the number of pods and their devices. All calls go through the official client, ``trivet[kubernetes]``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config
from urllib3.exceptions import HTTPError

from workers.launchers import (
    AllocatedHost,
    AllocationRequest,
    Booking,
    Launcher,
    LauncherContext,
    LauncherUnavailable,
)
from workers.launchers.asking import ANSWER_S, NAME, REPORT_S, OperatorOptions, errors_of, refused

_SERVICE, _JOB = "trivet/service", "trivet/job"
_QUEUE = "kueue.x-k8s.io/queue-name"
_HERE = "TRIVET_KUBERNETES"
"""The variable that describes the Job to its pods; each gets its own index from Kubernetes."""
_KEPT_S = 3600
"""Seconds for which Kubernetes keeps an ended Job and the output of its pods."""


def pods(ranks: int, max_hosts: int, most: int) -> tuple[int, int]:
    """Return the fewest pods that hold all ranks, and the devices of each. The pods of a Job are alike, so the
    last may have devices to spare. Raises :class:`LauncherUnavailable` if the ranks need too many pods.
    """
    count = math.ceil(ranks / most)
    if count > max_hosts:
        raise LauncherUnavailable(
            f"{ranks} ranks need {count} pods of {most} devices each, and max_hosts is {max_hosts}"
        )
    size = math.ceil(ranks / count)
    return math.ceil(ranks / size), size


class Kubernetes(Launcher):
    """Asks the API server, in one namespace. The template sets the priority, by a class of Kubernetes or Kueue;
    the supervisor keeps ``timeout_s``.
    """

    starts_within_s = 1800.0  # nodes may have to get the image

    def __init__(self, context: LauncherContext) -> None:
        super().__init__(context)
        self._options = _options(context.options)
        self._template = _template(Path(self._options.template))
        access = _access(self._options.context)
        self._batch, self._core = client.BatchV1Api(access), client.CoreV1Api(access)

    def describe(self) -> str:
        """Return where Jobs are made, and how many of this service run and wait."""
        bookings = self.allocations()
        waiting = sum(booking.is_waiting for booking in bookings)
        queue = f", queue {self._options.queue}" if self._options.queue else ""
        return f"namespace {self._options.namespace}{queue}: {len(bookings) - waiting} jobs run, {waiting} wait"

    def request(self, request: AllocationRequest) -> str:
        """Create a Job whose pods run the command."""
        manifest = self.manifest(request)
        job = client.V1Job.from_dict(manifest)
        assert job is not None
        _call(self._batch.create_namespaced_job, self._options.namespace, job)
        return str(manifest["metadata"]["name"])

    def manifest(self, request: AllocationRequest) -> dict[str, Any]:
        """Return the Job for a request, made from the operator's template. Raises :class:`LauncherUnavailable`."""
        count, size = pods(request.ranks, request.max_hosts, self._options.devices_per_pod)
        name, labels = f"{NAME}{secrets.token_hex(5)}", {_SERVICE: self.context.service, _JOB: request.job_id}
        job = copy.deepcopy(self._template)
        job["metadata"] = {**job.get("metadata", {}), "name": name}
        job["metadata"]["labels"] = {**job["metadata"].get("labels", {}), **labels}
        job["spec"] |= {
            "completions": count,
            "parallelism": count,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # a lost host ends the attempt, and the next attempt has another Job
            "ttlSecondsAfterFinished": _KEPT_S,
        }
        if self._options.queue:
            job["metadata"]["labels"][_QUEUE] = self._options.queue
            job["spec"]["suspend"] = True  # until Kueue admits it
        template = job["spec"]["template"]
        template.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
        template["spec"]["restartPolicy"] = "Never"
        template["spec"]["terminationGracePeriodSeconds"] = math.ceil(self.context.stop_grace_s + REPORT_S)
        self._fill_container(template["spec"]["containers"][0], request, name, size)
        return job

    def _fill_container(self, container: dict[str, Any], request: AllocationRequest, name: str, size: int) -> None:
        """Let a pod's container run the command on its ``size`` devices, and tell it which allocation it belongs to."""
        has_gpus = (self._options.auto if request.device == "auto" else request.device) == "cuda"
        resource = self._options.gpu_resource if has_gpus else "cpu"
        facts = {"namespace": self._options.namespace, "job": name}
        if self._options.queue:
            facts["queue"] = self._options.queue
        pool = "cuda" if has_gpus else "cpu"
        told = {"name": name, "ranks": request.ranks, "size": size, "pool": pool, "facts": facts}
        container["command"] = list(request.command)
        container["env"] = [*container.get("env", []), {"name": _HERE, "value": json.dumps(told)}]
        for kind in ("requests", "limits") if has_gpus else ("requests",):
            container.setdefault("resources", {}).setdefault(kind, {})[resource] = str(size)

    def allocations(self) -> list[Booking]:
        """Return the Jobs of this service that have neither ended nor been deleted."""
        jobs = self._list(self._batch.list_namespaced_job)
        found = self._list(self._core.list_namespaced_pod) if any(map(_waits, jobs)) else []
        reasons = {pod.metadata.labels[_JOB]: said for pod in found if (said := _why_unscheduled(pod))}
        return [_booking(job, reasons) for job in jobs if not (_is_over(job) or job.metadata.deletion_timestamp)]

    def cancel(self, allocations: Sequence[Booking]) -> None:
        """Delete Jobs, and their pods in the background, which get the grace of ranks."""
        for allocation in allocations:
            _call(
                self._batch.delete_namespaced_job,
                allocation.id,
                self._options.namespace,
                propagation_policy="Background",
                gone_is_fine=True,
            )

    @staticmethod
    def here(environment: Mapping[str, str]) -> AllocatedHost:
        """Return what this pod has: its share of the ranks."""
        told, index = json.loads(environment[_HERE]), int(environment["JOB_COMPLETION_INDEX"])
        ranks, size = told["ranks"], told["size"]
        return AllocatedHost(
            allocation=told["name"],
            index=index,
            count=math.ceil(ranks / size),
            pool=told["pool"],
            devices=min(size, ranks - index * size),
            facts=told["facts"],
        )

    def _list(self, call: Callable[..., Any]) -> list[Any]:
        selector = f"{_SERVICE}={self.context.service}"
        return list(_call(call, self._options.namespace, label_selector=selector).items)


def _options(text: str) -> argparse.Namespace:
    declared = OperatorOptions("kubernetes")
    declared.add_argument("--template", default="")
    declared.add_argument("--namespace", default="default")
    declared.add_argument("--context")
    declared.add_argument("--queue", default="")
    declared.add_argument("--devices-per-pod", type=int, default=8)
    declared.add_argument("--gpu-resource", default="nvidia.com/gpu")
    declared.add_argument("--auto", choices=("cuda", "cpu"), default="cuda")
    options = declared.read(text)
    if not options.template:
        declared.error("--template=FILE is missing; expected a Job such as docker/kubernetes/attempt.yaml")
    if options.devices_per_pod < 1:
        declared.error("--devices-per-pod must be at least 1")
    return options


def _access(context: str | None) -> client.ApiClient:
    """Return a client with the rights of this pod, or of the user whom ``KUBECONFIG`` or ``kubectl`` name."""
    settings = client.Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config(client_configuration=settings)
        else:
            file = os.environ.get("KUBECONFIG")
            config.load_kube_config(config_file=file, context=context, client_configuration=settings)
    except (config.ConfigException, OSError) as error:
        raise ValueError(f"Kubernetes cannot be reached: {error}") from error
    settings.retries = 0  # the worker asks again
    return client.ApiClient(settings)


def _template(path: Path) -> dict[str, Any]:
    """Return the operator's Job. Raises ``ValueError`` for a file without a Job that has a container."""
    found = yaml.safe_load(path.read_text())
    try:
        is_job = found["kind"] == "Job" and bool(found["spec"]["template"]["spec"]["containers"][0])
    except (TypeError, KeyError, IndexError):
        is_job = False
    if not is_job:
        raise ValueError(f"{path} is not a manifest of a Job with a container")
    return dict(found)


def _is_over(job: Any) -> bool:
    conditions = (job.status and job.status.conditions) or []
    return any(one.type in ("Complete", "Failed", "FailureTarget") and one.status == "True" for one in conditions)


def _waits(job: Any) -> bool:
    """Return whether no pod of the Job has run since the Job was started."""
    status = job.status
    has_run = status is not None and bool(status.ready or status.succeeded or status.failed)
    return bool(job.spec.suspend) or not has_run


def _why_unscheduled(pod: Any) -> str:
    """Return why a pod has no node, in Kubernetes' words."""
    conditions = (pod.status and pod.status.conditions) or []
    return next((one.message or "" for one in conditions if one.type == "PodScheduled" and one.status == "False"), "")


def _booking(job: Any, reasons: Mapping[str, str]) -> Booking:
    name, job_id = job.metadata.name, job.metadata.labels[_JOB]
    if not _waits(job):
        return Booking(name, job_id, is_waiting=False)
    queue = job.metadata.labels.get(_QUEUE)
    why = f"is in the queue {queue}" if job.spec.suspend else reasons.get(job_id) or "starts"
    return Booking(name, job_id, is_waiting=True, reason=f"Kubernetes job {name}: {why}")


def _call(call: Callable[..., Any], *words: Any, gone_is_fine: bool = False, **fields: Any) -> Any:
    """Return what the client's call returns. Raises :class:`LauncherUnavailable`."""
    with errors_of("Kubernetes", HTTPError):
        try:
            return call(*words, **fields, _request_timeout=ANSWER_S)
        except client.ApiException as error:
            return refused("Kubernetes", error.status or 0, str(error.reason), error.body or "", gone_is_fine)
