"""Gets devices from Slurm: one ``sbatch`` for each attempt, one process in the step of each node.

Needs Slurm 20.11 or newer, its commands on the worker's path, and process tracking that sends SIGTERM only to a
step's own processes (``proctrack/cgroup`` or ``proctrack/pgid``). With any other, ranks are killed before their
checkpoint.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence

from workers.launchers import AllocatedHost, AllocationRequest, Booking, Launcher, LauncherContext
from workers.launchers.asking import NAME, OperatorOptions, ask

_FIELDS = ("JobID", "Name", "State", "Reason", "RestartCnt", "Comment")
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
_GIVEN_UP = ("launch_failed_requeued_held", "launch_failure_limit_exceeded_requeued_held", "jobholdmaxrequeue")
"""The reasons of a job that Slurm could not start on a node and holds until somebody releases it."""
_FIRST_OF_NODE = '[ "$SLURM_LOCALID" = 0 ] || exit 0; exec "$@"'
"""A step has one task per rank, so that it gets the whole allocation; only one task of each node runs the command."""
_MARGIN_S = 60.0
"""Seconds of an allocation for the start and the end of an attempt."""
_FACTS = {
    "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT",
    "qos": "SLURM_JOB_QOS",
    "nodes": "SLURM_JOB_NODELIST",
    "user": "SLURM_JOB_USER",
    "cluster": "SLURM_CLUSTER_NAME",
}


class Slurm(Launcher):
    """Asks ``slurmctld`` through Slurm's own commands, as the worker's user. The operator's options are those
    of ``sbatch``.
    """

    def __init__(self, context: LauncherContext) -> None:
        super().__init__(context)
        self._further = OperatorOptions("slurm").words(context.options)

    def describe(self) -> str:
        """Return partitions with their nodes and CPUs."""
        rows = ask("sinfo", "--noheader", "--summarize", "--format=%R|%F|%C|%G").splitlines()
        return "; ".join(_partition(*row.split("|")) for row in dict.fromkeys(rows)) or "no partition"

    def request(self, request: AllocationRequest) -> str:
        """Submit a batch job that starts the command once on each of its nodes."""
        return ask("sbatch", *self._options(request), stdin=_script(request.command)).strip().partition(";")[0]

    def allocations(self) -> list[Booking]:
        """Return the batch jobs of this service that are in Slurm's queue."""
        fields = ",".join(f"{name}:|" for name in _FIELDS)
        rows = ask("squeue", "--me", "--noheader", "--states=all", f"--Format={fields}").splitlines()
        return [
            _allocation(*row)
            for row in (line.split("|")[: len(_FIELDS)] for line in rows)
            if row[-1] == self._comment and row[1].startswith(NAME) and row[2] not in _OVER
        ]

    def cancel(self, allocations: Sequence[Booking]) -> None:
        """Cancel batch jobs."""
        if allocations:
            ask("scancel", "--quiet", *(allocation.id.partition(".")[0] for allocation in allocations))

    @staticmethod
    def here(environment: Mapping[str, str]) -> AllocatedHost:
        """Return this node as a host: the GPUs that Slurm gives this step, else one device per task."""
        index = int(environment["SLURM_NODEID"])
        gpus = int(environment.get("SLURM_GPUS_ON_NODE") or 0)
        return AllocatedHost(
            allocation=f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_RESTART_COUNT', '0')}",
            index=index,
            count=int(environment["SLURM_JOB_NUM_NODES"]),
            pool="cuda" if gpus else "cpu",
            devices=gpus or tasks_per_node(environment["SLURM_TASKS_PER_NODE"])[index],
            facts={name: environment[variable] for name, variable in _FACTS.items() if environment.get(variable)},
        )

    @property
    def _comment(self) -> str:
        return f"trivet:{self.context.service}"

    def _options(self, request: AllocationRequest) -> list[str]:
        folder = self.context.folder
        options = [
            "--parsable",
            f"--job-name={NAME}{request.job_id}",
            f"--comment={self._comment}",
            f"--nodes=1-{request.max_hosts}",
            f"--ntasks={request.ranks}",
            f"--nice={100 - request.priority}",
            "--requeue",
            "--open-mode=append",
            f"--output={folder}/{request.job_id}.log",
            f"--chdir={folder}",
        ]
        if request.device == "cuda" or (
            request.device == "auto" and "gpu" in ask("sinfo", "--noheader", "--format=%G")
        ):
            options.append("--gpus-per-task=1")
        if request.timeout_s is not None:
            seconds = request.timeout_s + self.context.stop_grace_s + _MARGIN_S
            options.append(f"--time={math.ceil(seconds / 60)}")
        return [*options, *self._further]


_OVER = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"}
    | {"TIMEOUT"}
)


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's notation: ``2(x3),1`` is two on each of three nodes, then one."""
    counts: list[int] = []
    for tasks, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts


def _script(command: Sequence[str]) -> str:
    """Return a batch script that starts the command once on each node, bound to no core or GPU: ranks share all."""
    once = shlex.join(["sh", "-c", _FIRST_OF_NODE, "trivet", *command])
    unbound = "--cpu-bind=none ${SLURM_GPUS_PER_TASK:+--gpu-bind=none}"
    return f"#!/bin/sh\nexec srun --kill-on-bad-exit=0 {unbound} {once}\n"


def _allocation(number: str, name: str, state: str, reason: str, restarts: str, _: str) -> Booking:
    is_waiting, is_given_up = state in _WAITING, reason.lower().replace(" ", "_") in _GIVEN_UP
    said = f"{state.lower()}, {reason}" if reason not in ("None", "") else state.lower()
    return Booking(
        f"{number}.{restarts}",
        name.removeprefix(NAME),
        is_waiting,
        f"Slurm job {number} is {said}" if is_waiting else "",
        is_given_up,
    )


def _partition(name: str, nodes: str, cpus: str, gres: str) -> str:
    allocated, idle, _, total = nodes.split("/")
    _, idle_cpus, _, all_cpus = cpus.split("/")
    gpus = "" if gres in ("(null)", "") else f", {gres} each"
    return f"{name}: {idle} of {total} nodes idle, {allocated} allocated, {idle_cpus} of {all_cpus} CPUs idle{gpus}"
