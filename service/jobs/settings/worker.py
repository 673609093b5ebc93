"""Settings of workers."""

from __future__ import annotations

import socket

from pydantic import BaseModel, Field

from service.jobs.spec.common import LAUNCHER_NAME, LOCAL


class WorkerSettings(BaseModel):
    """A worker's name, its launchers, and how it starts and stops jobs."""

    worker_name: str = Field(
        default_factory=socket.gethostname, min_length=1, description="name under which a worker reports itself"
    )
    worker_address: str | None = Field(
        None,
        description="address at which other hosts of a gang reach this one; when absent, the one from which it "
        "reaches the broker",
    )
    launcher: str = Field(
        LOCAL,
        pattern=LAUNCHER_NAME.pattern,
        description="launcher of jobs that name none: `local`, the hosts of the service, or a scheduler's",
    )
    launchers: str = Field(
        "",
        pattern=r"^([a-z]{2,20}(,[a-z]{2,20})*)?$",
        description="launchers that this worker serves besides its own devices, by comma, such as `slurm`",
    )
    slurm_options: str = Field(
        "", description="further options of sbatch for the launcher `slurm`, such as --partition=gpu --account=lab"
    )
    ray_options: str = Field(
        "",
        description="for the launcher `ray`, such as --address=http://head:8265 and further resources of each device, "
        "--resources='{\"accelerator_type:H100\": 0.001}'",
    )
    kubernetes_options: str = Field(
        "",
        description="for the launcher `kubernetes`, first of all --template=FILE and --namespace=NAME, and "
        "--queue=NAME with Kueue",
    )
    stop_jobs: bool = Field(
        False,
        description="whether a worker that is stopped first stops its jobs, which write a checkpoint and go back to "
        "the queue, as containers need; otherwise they go on without their worker",
    )
    warm_supervisors: int = Field(
        1,
        ge=0,
        le=64,
        description="whether the worker keeps a process with all imports of ranks, from which jobs are forked so that "
        "they start sooner: 0 is no, any other number yes",
    )
    warm_idle_s: float = Field(
        180.0,
        ge=0,
        description="seconds without a job after which a process without torch takes its place, so that memory is "
        "free; the first job after that starts a second or two later. 0 keeps it",
    )
    stop_grace_s: float = Field(
        10.0, ge=0, description="seconds that ranks get to write a checkpoint when their job is stopped"
    )
    cpu_slots: int | None = Field(
        None, ge=0, le=4096, description="CPU ranks that may run here; one per core, but at least 4, when absent"
    )
    cpu_niceness: int = Field(
        10,
        ge=0,
        le=19,
        description="what is added to the niceness of ranks on CPU slots, so that the service and the host threads of "
        "GPU jobs go first when cores are short; 0 gives all the same weight",
    )
