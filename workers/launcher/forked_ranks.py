"""Lets torchrun start ranks as forks of its own process, which has imported their modules.

New interpreters would each import them again. A fork runs the module or script of its command line (``python … -m
MODULE``) as ``__main__``. To everybody else it looks like that command: it has its own session, environment and
command line, signals as at the start of a program, and only the standard descriptors. If its parent has other threads
or has initialised CUDA, a fork could not go on, so it becomes a new interpreter.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import runpy
import signal
import site
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from service.linux import leave, present_as
from service.torch_internals.table import internal, set_internal
from workers import forks

_HANDLERS = "torch.distributed.elastic.multiprocessing.api.get_subprocess_handler"


def fork_ranks(environment: Mapping[str, str]) -> None:
    """Have torchrun fork its ranks from now on. ``environment`` is theirs besides what torchrun sets."""
    internal(_HANDLERS)
    internal("torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler._popen")
    gc.freeze()  # so that no fork copies the pages of all objects with its first collection

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            set_by_torchrun = {name: value for name, value in env.items() if os.environ.get(name) != value}
            return ForkedProgram(args, {**environment, **set_by_torchrun})

    set_internal(_HANDLERS, Handler)


class ForkedProgram(forks.Child):
    """A fork that runs a Python program, with the part of :class:`subprocess.Popen` that torchrun uses."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        is_alone = len(forks.threads()) == 1
        held_before = signal.pthread_sigmask(signal.SIG_BLOCK, forks.HELD_BACK)
        try:
            super().__init__(os.fork())
            if self.pid == 0:
                _run(list(arguments), dict(environment), held_before, is_alone=is_alone)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_before)


def _run(
    arguments: list[str], environment: dict[str, str], held_back: Iterable[signal.Signals | int], *, is_alone: bool
) -> NoReturn:
    """Run the program to its end. Signals other than ``held_back`` reach it once they act as they do on a new
    program.
    """
    code = 1
    try:
        _begin_anew(environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        if not is_alone or internal("torch.cuda._is_in_bad_fork")():
            os.execve(arguments[0], arguments, environment)  # noqa: S606 - there is nothing for a shell to do
        present_as(arguments, environment)
        _begin_computing_anew(environment)
        code = _run_as_main(arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    leave(code)


def _begin_anew(environment: dict[str, str]) -> None:
    """Undo everything that a fork inherits and a new program lacks."""
    os.setsid()
    forks.let_signals_be()
    forks.close_others()
    os.environ.clear()
    os.environ.update(environment)


def _begin_computing_anew(environment: Mapping[str, str]) -> None:
    """Set what libraries read from the environment, or draw at random, at import."""
    if (threads := environment.get("OMP_NUM_THREADS", "")).isdecimal():
        torch.set_num_threads(max(1, int(threads)))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    torch.default_generator.seed()
    _recompute(environment)


def _run_as_main(arguments: list[str]) -> int:
    """Run ``python [-u] -m MODULE …`` or ``python [-u] SCRIPT …``; return its exit code."""
    rest = [word for word in arguments[1:] if word != "-u"]
    try:
        if rest[0] == "-m":
            sys.argv = rest[1:]
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = rest
            runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def _recompute(environment: Mapping[str, str]) -> None:
    """Set, in this process, what already imported modules would compute from ``environment`` if they were
    imported now.
    """
    time.tzset()
    multiprocessing.current_process().authkey = os.urandom(32)
    _restart_log_clock(logging)
    _forget_home(site)
    # Importing it here would bring all of TorchInductor.
    if (folders := sys.modules.get("torch._inductor.runtime.cache_dir_utils")) is not None:
        _recompute_compile_folders(environment, folders.default_cache_dir())
    if (knobs := sys.modules.get("triton.knobs")) is not None:
        _forget_triton_home(knobs)


def _restart_log_clock(module: Any) -> None:
    """Restart the clock of log records; whole nanoseconds from Python 3.13 on."""
    module._startTime = time.time_ns() if isinstance(module._startTime, int) else time.time()


def _forget_home(module: Any) -> None:
    """Let the user's own package folder follow ``HOME``."""
    module.USER_BASE = module.USER_SITE = None
    module.getusersitepackages()
    sysconfig: Any = sys.modules.get("sysconfig")
    if sysconfig is not None and sysconfig._CONFIG_VARS is not None:
        sysconfig._CONFIG_VARS["userbase"] = module.USER_BASE


def _recompute_compile_folders(environment: Mapping[str, str], default: str) -> None:
    """Move the files of TorchInductor and Dynamo, where they are imported, to this process's folders.

    ``default`` is the folder of everything without a place of its own.
    """
    if "torch._inductor.codecache" in sys.modules:
        set_internal("torch._inductor.codecache._HEADER_DIR", f"{default}/precompiled_headers")
        set_internal("torch._inductor.codecache._HEADER_LOCK_DIR", f"{default}/precompiled_headers/locks")
    if "torch._dynamo.package" in sys.modules:
        base = Path(environment.get(_CACHE) or default).absolute()
        set_internal("torch._dynamo.package.DynamoCache._path_prefix", str(base / "dynamo"))


def _forget_triton_home(knobs: Any) -> None:
    """Let Triton's caches follow ``HOME``, as Triton 3.6 keeps it, unless ``TRITON_HOME`` says otherwise."""
    home: Any = vars(getattr(knobs, "cache_knobs", object)).get("home_dir")
    if hasattr(home, "default"):
        home.default = f"{Path.home()}/"
