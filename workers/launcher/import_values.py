"""Computes anew, in a fork, what modules take from their process while they are imported: environment, user and time.

A module that was imported before there was a job has seen the launcher's folders, user and clock, and no others; what
it keeps of them would be wrong in a rank, where a fresh interpreter would have it right.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import site
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def recompute(environment: Mapping[str, str]) -> None:
    """Set, in this process, what modules that are imported already would compute from ``environment`` if they were
    imported now.
    """
    time.tzset()
    multiprocessing.current_process().authkey = os.urandom(32)
    _restart_log_clock(logging)
    _forget_home(site)
    # Importing it here would bring all of TorchInductor, for which it is.
    if (folders := sys.modules.get("torch._inductor.runtime.cache_dir_utils")) is not None:
        _recompute_compile_folders(environment, folders.default_cache_dir())
    if (knobs := sys.modules.get("triton.knobs")) is not None:
        _forget_triton_home(knobs)


def _restart_log_clock(module: Any) -> None:
    """Let log records count their time from here; whole nanoseconds from Python 3.13 on."""
    module._startTime = time.time_ns() if isinstance(module._startTime, int) else time.time()


def _forget_home(module: Any) -> None:
    """Let the user's own folder of packages follow ``HOME``."""
    module.USER_BASE = module.USER_SITE = None
    module.getusersitepackages()
    sysconfig: Any = sys.modules.get("sysconfig")
    if sysconfig is not None and sysconfig._CONFIG_VARS is not None:
        sysconfig._CONFIG_VARS["userbase"] = module.USER_BASE


def _recompute_compile_folders(environment: Mapping[str, str], default: str) -> None:
    """Move to this process's folders what TorchInductor and Dynamo keep there, as torch 2.11 to 2.13 name it.

    ``default`` is the folder of what has no other place.
    """
    code: Any = sys.modules.get("torch._inductor.codecache")
    if hasattr(code, "_HEADER_DIR"):
        code._HEADER_DIR = f"{default}/precompiled_headers"
    if hasattr(code, "_HEADER_LOCK_DIR"):
        code._HEADER_LOCK_DIR = f"{code._HEADER_DIR}/locks"
    package: Any = sys.modules.get("torch._dynamo.package")
    if hasattr(getattr(package, "DynamoCache", None), "_path_prefix"):
        base = Path(environment.get(_CACHE) or default).absolute()
        package.DynamoCache._path_prefix = str(base / "dynamo")


def _forget_triton_home(knobs: Any) -> None:
    """Let Triton's caches follow ``HOME`` where ``TRITON_HOME`` does not say otherwise, as Triton 3.6 keeps it."""
    home: Any = vars(getattr(knobs, "cache_knobs", object)).get("home_dir")
    if hasattr(home, "default"):
        home.default = f"{Path.home()}/"
