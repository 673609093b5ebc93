"""What the checks of a spec may ask for at submission."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from service.jobs.plugins.configs import ModelConfig
from service.jobs.records import Job


@dataclass(frozen=True)
class CheckContext:
    """What is known beside a spec when it is submitted. By default: no host, no other job, and every file unread."""

    fleet_capacity: Mapping[str, int] | None = None
    """Devices of the known hosts by pool (``cuda``, ``cpu``); ``None`` where no host is known."""
    lookup: Callable[[str], Job | None] = lambda _: None
    """Returns another job by its id."""
    has_file: Callable[[str], bool] = lambda _: True
    """Whether a file was uploaded, by its id."""
    uploaded: Callable[[str], ModelConfig | None] = lambda _: None
    """Returns the model's configuration in an uploaded archive, by its id; ``None`` where nothing is known of it.
    Raises ``ValueError`` where the archive holds none that a rank could take.
    """
    path_of: Callable[[str], Path | None] = lambda _: None
    """Returns where the content of an uploaded file is, by its id; ``None`` where it is not known."""
