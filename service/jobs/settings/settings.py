"""Settings of the service: each one an environment variable ``TRIVET_…`` or a line of a TOML file.

The environment wins over the file. The file is ``TRIVET_CONFIG``, else ``trivet.toml`` in the working directory
when it exists. ``trivet settings`` lists every setting with its value and where it came from.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from service.jobs.host import ENV_PREFIX, config_file, in_file
from service.jobs.records.store_limits import StoreLimits
from service.jobs.settings.groups import LOOPBACK, ApiSettings, BrokerSettings, DeliverySettings, SignInSettings
from service.jobs.spec.common import LAUNCHER_NAME, LOCAL
from service.jobs.text import LogFormat

__all__ = ["LOOPBACK", "MAX_LOG_BYTES", "Settings", "describe", "sources"]

_DAY_S = 86_400.0
MAX_LOG_BYTES = 256 << 20


class Settings(SignInSettings, DeliverySettings, ApiSettings, BrokerSettings, BaseSettings):
    """The operator's choices; each field is a setting with its default, bounds and description.

    Fields of the base classes come first, those of the last one before the others.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,  # what is refused may hold a password
    )

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

    job_isolation: Literal["auto", "required", "none"] = Field(
        "auto",
        description="how ranks are kept from the host and from other jobs: as far as the host allows, fully or not at "
        "all, or by limits only; `trivet hosts` shows what each host allows",
    )
    job_memory_gib: float | None = Field(
        None, gt=0, description="private memory of a rank's process, in GiB; all of the host's when absent"
    )
    job_file_gib: float = Field(1024.0, gt=0, description="largest file that a rank may write, in GiB")
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

    lease_s: float = Field(
        StoreLimits.lease_s,
        ge=1,
        le=_DAY_S,
        description="seconds of silence after which a running part is lost",
    )
    starting_lease_s: float = Field(
        StoreLimits.starting_lease_s,
        ge=1,
        le=_DAY_S,
        description="seconds after which a placed part that nobody claims is taken back",
    )
    heartbeat_s: float = Field(
        StoreLimits.heartbeat_s,
        ge=1,
        le=_DAY_S,
        description="seconds of silence after which a host gets no work",
    )
    max_queue_bypass_s: float = Field(
        StoreLimits.max_queue_bypass_s,
        ge=0,
        le=365 * _DAY_S,
        description="seconds of waiting after which a job is never overtaken",
    )

    quota_window_h: int = Field(
        StoreLimits.quota_window_h,
        ge=1,
        le=744,
        description="hours that quotas of device-hours count, the current one included",
    )
    fair_share_half_life_s: float = Field(
        StoreLimits.fair_share_half_life_s,
        ge=1,
        le=365 * _DAY_S,
        description="seconds after which a project's use counts half as much against other projects",
    )
    fair_share_bound_s: float | None = Field(
        None,
        ge=0,
        le=365 * _DAY_S,
        description="seconds of waiting after which projects that used less no longer overtake a job; "
        "max_queue_bypass_s when absent",
    )

    preemption_min_run_s: float = Field(
        StoreLimits.preemption_min_run_s,
        ge=0,
        le=365 * _DAY_S,
        description="seconds that a preemptible job runs before it may be asked to make room",
    )

    max_lost_attempts: int = Field(
        StoreLimits.max_lost_attempts,
        ge=0,
        le=1000,
        description="attempts that hosts or the broker may lose before the job fails; retries are extra",
    )

    keep_jobs_days: float | None = Field(
        None, gt=0, description="days after which ended jobs are deleted with their files; kept when absent"
    )

    max_audit_bytes: int = Field(
        StoreLimits.max_audit_bytes,
        ge=16 << 20,
        description="most bytes of the audit log's files; beyond, the oldest entries are deleted",
    )

    keep_uploads_days: float | None = Field(
        StoreLimits.keep_uploads_days,
        ge=0,
        description="days without a submission after which an upload is deleted; 0 keeps all",
    )

    max_job_artifacts: int = Field(
        StoreLimits.max_job_artifacts, ge=1, le=1_000_000, description="most artifacts of one job"
    )
    max_job_artifact_bytes: int = Field(
        StoreLimits.max_job_artifact_bytes,
        ge=1 << 20,
        description="most bytes of all artifacts of one job, folders included",
    )
    max_log_bytes: int = Field(
        MAX_LOG_BYTES,
        ge=1 << 16,
        description="bytes kept of a rank's output in an attempt: the first quarter, and the newest of the rest",
    )
    max_cache_bytes: int = Field(
        20 << 30,
        ge=0,
        description="most bytes of what jobs make of uploaded files, and of what they compile and trace on each host; "
        "beyond, the longest unused is deleted first",
    )

    url: str | None = Field(None, description="API that the command line uses; that of the data folder when absent")
    key: SecretStr | None = Field(None, description="API key that the command line uses at `url`")
    ca_cert: Path | None = Field(
        None, description="PEM certificate of `url` or of its authority, in place of the system's authorities"
    )

    outage_s: float = Field(
        60.0,
        ge=0,
        le=_DAY_S,
        description="seconds of an outage of the service that commands outlast",
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is logged"
    )
    log_format: LogFormat = Field(
        "text", description="format of the logs of API and workers: text for people, or json with one object per line"
    )

    @property
    def admin_key_path(self) -> Path:
        """Return where the first admin key is kept, readable by its owner only."""
        return self.admin_key_file or self.layout.admin_key

    @property
    def store_limits(self) -> StoreLimits:
        """Return the store's limits with the operator's choices; other limits cannot be chosen."""
        return StoreLimits(
            launcher=self.launcher,
            objects=self.store,
            lease_s=self.lease_s,
            starting_lease_s=self.starting_lease_s,
            heartbeat_s=self.heartbeat_s,
            max_queue_bypass_s=self.max_queue_bypass_s,
            fair_share_half_life_s=self.fair_share_half_life_s,
            quota_window_h=self.quota_window_h,
            fair_share_bound_s=self.fair_share_bound_s,
            preemption_min_run_s=self.preemption_min_run_s,
            max_lost_attempts=self.max_lost_attempts,
            max_file_bytes=self.max_file_bytes,
            max_job_artifacts=self.max_job_artifacts,
            max_job_artifact_bytes=self.max_job_artifact_bytes,
            keep_uploads_days=self.keep_uploads_days or None,
            max_key_s=None if self.max_key_days is None else self.max_key_days * _DAY_S,
            session_idle_s=self.session_idle_s,
            session_s=self.session_s,
            max_audit_bytes=self.max_audit_bytes,
            export_mlflow=self.export_mlflow,
            export_tensorboard=self.export_tensorboard,
            export_otlp=self.export_otlp,
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = config_file()
        file_source = () if path is None else (TomlConfigSettingsSource(settings_cls, toml_file=path),)
        return (init_settings, env_settings, *file_source)


@dataclass(frozen=True)
class _SettingLine:
    """One setting as ``trivet settings`` lists it. ``source`` is ``default``, ``environment`` or the file's path."""

    name: str
    variable: str
    value: str
    default: str
    source: str
    description: str


def sources() -> dict[str, str]:
    """Return the source of each chosen setting, by name: ``environment``, or the file's path."""
    set_outside = {name.upper() for name, value in os.environ.items() if value}
    chosen = dict.fromkeys(in_file(), str(config_file()))
    return chosen | {
        name: "environment" for name in Settings.model_fields if (ENV_PREFIX + name).upper() in set_outside
    }


def describe(settings: Settings) -> list[_SettingLine]:
    """Return every setting, in the order of their declaration; secrets are masked."""
    chosen = sources()
    lines = []
    for name, field in Settings.model_fields.items():
        variable = (ENV_PREFIX + name).upper()
        source = chosen.get(name, "default")
        default = field.get_default(call_default_factory=True, validated_data={})
        lines.append(
            _SettingLine(
                name, variable, _shown(getattr(settings, name)), _shown(default), source, field.description or ""
            )
        )
    return lines


def _shown(value: object) -> str:
    return "" if value is None else str(value)
