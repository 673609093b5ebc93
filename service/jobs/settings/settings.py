"""Settings of the service: each one an environment variable ``TRIVET_…`` or a line of a TOML file.

The environment wins over the file. The file is ``TRIVET_CONFIG``, else ``trivet.toml`` in the working directory
when it exists. ``trivet settings`` lists every setting with its value and where it came from.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from service.jobs.host import ENV_PREFIX, config_file, in_file
from service.jobs.records.store_limits import StoreLimits
from service.jobs.settings.api import ApiSettings
from service.jobs.settings.broker import BrokerSettings
from service.jobs.settings.client import ClientSettings
from service.jobs.settings.delivery import DeliverySettings
from service.jobs.settings.isolation import IsolationSettings
from service.jobs.settings.queue import QueueSettings
from service.jobs.settings.retention import RetentionSettings
from service.jobs.settings.sign_in import SignInSettings
from service.jobs.settings.worker import WorkerSettings


class Settings(
    ClientSettings,
    RetentionSettings,
    QueueSettings,
    IsolationSettings,
    WorkerSettings,
    SignInSettings,
    DeliverySettings,
    ApiSettings,
    BrokerSettings,
    BaseSettings,
):
    """The operator's choices; each field is a setting with its default, bounds and description.

    A group of them is a base class. Fields of the last one come first.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,  # what is refused may hold a password
    )

    @property
    def admin_key_path(self) -> Path:
        """Return where the first admin key is kept, readable by its owner only."""
        return self.admin_key_file or self.layout.admin_key

    @property
    def store_limits(self) -> StoreLimits:
        """Return the store's limits with the operator's choices; other limits cannot be chosen."""
        chosen = {
            each.name: getattr(self, each.name) for each in fields(StoreLimits) if each.name in Settings.model_fields
        }
        differing: dict[str, Any] = {"objects": self.store, "keep_uploads_days": self.keep_uploads_days or None}
        return StoreLimits(**(chosen | differing))

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


def unknown_variables() -> list[str]:
    """Return a line for each variable that looks like a setting and is none."""
    known = [(ENV_PREFIX + name).upper() for name in (*Settings.model_fields, "config")]
    told = []
    for name in sorted(os.environ):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.8)
            told.append(f"{name} is no setting{f'; did you mean {close[0]}?' if close else ''}")
    return told


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
                name, variable, _as_text(getattr(settings, name)), _as_text(default), source, field.description or ""
            )
        )
    return lines


def _as_text(value: object) -> str:
    return "" if value is None else str(value)
