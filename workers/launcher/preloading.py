"""Imports modules that ranks need, in the process from which they will be forked."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from service.garbage import uncollected
from service.jobs.kinds.registry import KINDS
from service.jobs.plugins.catalogue import HOUSE
from workers import forks

logger = logging.getLogger(__name__)

_TRIAL_S = 60.0
"""The time limit for importing the modules of one kind."""


def preload_every_kind() -> None:
    """Import the modules that the kinds name.

    Modules of other packages are first tried in a fork. Anything that an import leaves behind besides modules
    would be in every job, so such a kind is left to its own ranks.
    """
    for kind, provided in KINDS.provided.items():
        modules = provided.declaration.preloads
        reason = "" if provided.distribution == HOUSE else what_import_leaves(modules)
        if reason:
            logger.warning(
                "preloads=%r of job kind %r %s, so its ranks import everything again; expected modules that "
                "change nothing but themselves on import",
                modules,
                kind,
                reason,
            )
        else:
            _import(modules)


def preload(kind: str) -> None:
    """Import the modules of the one kind that this process will run."""
    _import(KINDS.declaration(kind).preloads)
    if len(names := forks.threads()) > 1:
        logger.warning(
            "preloads=%r of job kind %r start a thread (%s), so each rank imports everything again; expected "
            "modules that start threads only in use",
            KINDS.declaration(kind).preloads,
            kind,
            ", ".join(names),
        )


def _import(modules: Sequence[str]) -> None:
    """Import the existing ones; ranks report what is wrong with a module when they import it again."""
    with uncollected():
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)


def what_import_leaves(modules: Sequence[str]) -> str:
    """Return why modules must not be imported into a process that forks many jobs, as the end of a sentence; empty if
    nothing is. A fork of this process tries it.
    """
    with tempfile.TemporaryFile() as told, Path(os.devnull).open("rb") as nothing:
        trial = forks.fork(lambda: _try(modules, told), stdin=nothing.fileno(), keep=[told.fileno()])
        try:
            code = trial.wait(_TRIAL_S)
        except subprocess.TimeoutExpired:
            trial.kill()
            trial.wait()
            return f"take more than {_TRIAL_S:g} s to be imported"
        if code != 0:
            return f"end the process that imports them (exit code {code})"
        told.seek(0)
        return told.read().decode()


def _try(modules: Sequence[str], told: IO[bytes]) -> int:
    before = _Surroundings.now()
    _import(modules)
    told.write(before.differences(_Surroundings.now()).encode())
    told.flush()
    return 0


@dataclass(frozen=True)
class _Surroundings:
    """State outside of modules that an import could change, and that forks would lack or should not inherit."""

    threads: Any
    environment_variables: Any
    the_working_folder: Any
    open_files: Any
    open_devices: Any
    signal_handlers: Any
    random_numbers: Any

    @classmethod
    def now(cls) -> _Surroundings:
        numpy: Any = sys.modules.get("numpy")
        torch: Any = sys.modules.get("torch")
        numbers = numpy.random.get_state()[1].tobytes() if numpy else b""
        return cls(
            threads=sorted(forks.threads()),
            environment_variables=dict(os.environ),
            the_working_folder=Path.cwd(),
            open_files=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - their number alone
            open_devices=forks.open_devices(),
            signal_handlers=[signal.getsignal(number) for number in sorted(signal.valid_signals())],
            random_numbers=(random.getstate(), numbers, torch.initial_seed() if torch else 0),
        )

    def differences(self, after: _Surroundings) -> str:
        """Return the differences from before, as the end of a sentence; empty if there are none."""
        names = [each.name for each in fields(self) if getattr(self, each.name) != getattr(after, each.name)]
        return f"change {', '.join(name.replace('_', ' ') for name in names)}" if names else ""
