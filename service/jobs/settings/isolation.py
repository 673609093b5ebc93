"""Settings of what jobs may reach and use on their hosts."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

_MOST_GIB = 2**32
"""More than any limit of a process can say."""


class IsolationSettings(BaseModel):
    """What ranks may see of their host, and how much of it they may use."""

    job_isolation: Literal["auto", "required", "none"] = Field(
        "auto",
        description="how ranks are kept from the host and from other jobs: as far as the host allows, fully or not at "
        "all, or by limits only; `trivet hosts` shows what each host allows",
    )
    job_memory_gib: float | None = Field(
        None,
        gt=0,
        le=_MOST_GIB,
        description="private memory of a rank's process, in GiB; all of the host's when absent",
    )
    job_file_gib: float = Field(1024.0, gt=0, le=_MOST_GIB, description="largest file that a rank may write, in GiB")
    job_processes: int = Field(
        16_384, ge=64, description="processes and threads of a job on a host, if it has a namespace that counts them"
    )
    job_paths: str = Field(
        "",
        description="further files and folders that ranks may read, such as data or packages outside the installation, "
        "separated by colons",
    )
    job_environment: str = Field(
        "",
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*(,[A-Za-z_][A-Za-z0-9_]*)*)?$",
        description="names of further environment variables that ranks get from their worker, separated by commas",
    )
