"""Tells the host's errors from the program's: a run that a full disk or a missing compiler stops is not judged."""

from __future__ import annotations

import errno
import re
import traceback

import torch

from service.compilation.instruments.text import first_line
from service.parallel.boundary.holders import FOREIGN
from service.torch_internals.table import TorchInternalMissing, internal

_NUMBERS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
    | {errno.ENOMEM, errno.EIO, errno.EAGAIN}
)
"""Error numbers of faults of the host, which any program would meet."""
_WORDS = re.compile(
    r"PermissionError|Permission denied|Operation not permitted(?! (?:when|on) )|Read-only file system"
    r"|No space left on device|Disk quota exceeded|Too many open files|Cannot allocate memory|can't allocate memory"
    r"|MemoryError|fatal error: Killed signal|Input/output error|No working C\+\+ compiler|Failed to find C compiler"
    r"|Cannot find a working triton",
    re.IGNORECASE,
)
"""Messages about such faults that compilers, allocators and compiling processes put in errors of other types. What CUDA
does not permit "when stream is capturing", or "on an event" of a capture, is the program's.
"""
_OTHERS_SHARE = 0.1
"""The share of a device's memory that other processes must hold to be the cause of its shortage."""


class HostFaultError(RuntimeError):
    """The check could not be made, through no fault of the program: there is no verdict."""


def raise_host_fault(error: BaseException) -> None:
    """Raise :class:`HostFaultError` from ``error`` if that, or its cause, is a fault of the host."""
    causes = _causes(error)
    compiles = any(isinstance(each, _backend_failed()) for each in causes)  # it opens no file of the program
    cause = next((each for each in causes if _is_of_host(each) or (compiles and isinstance(each, OSError))), None)
    if cause is not None:
        raise HostFaultError(f"the check could not be made on this host: {_describe_cause(cause)}") from error


def fault_of_program(error: Exception) -> str:
    """Describe an error of the program's own; raise :class:`HostFaultError` for one of the host's."""
    raise_host_fault(error)
    return describe(error)


def describe(error: Exception) -> str:
    """Return the class, the first line of the message, and the last place outside of installed packages and of what
    watches the program; of code that Dynamo was tracing, the line there.
    """
    traced = getattr(error, "real_stack", None) or ()
    frames = [
        frame
        for frame in (*traceback.extract_tb(error.__traceback__), *traced)
        if not any(part in frame.filename for part in ("site-packages", *FOREIGN))
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(str(error))}{place}"


def _describe_cause(cause: BaseException) -> str:
    text = str(cause)
    words = _WORDS.search(text)
    line = text[text.rfind("\n", 0, words.start()) + 1 :] if words else text
    return f"{type(cause).__name__}: {first_line(line)}"


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, from the inside out: the first cause says most."""
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or each in seen:
            continue
        seen.append(each)
        pending += [getattr(each, "inner_exception", None), each.__cause__, each.__context__]
    return seen[::-1]


def _is_of_host(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return _others_hold_memory()
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return True
    if isinstance(error, (MemoryError, TorchInternalMissing, internal("torch._inductor.exc.InvalidCxxCompiler"))):
        return True
    # The text of a program's own error proves nothing; only one that repeats another's text does.
    return _repeats_another(error) and bool(_WORDS.search(str(error)))


def _backend_failed() -> type[Exception]:
    found: type[Exception] = internal("torch._dynamo.exc.BackendCompilerFailed")
    return found


def _repeats_another(error: BaseException) -> bool:
    """Return whether ``error`` repeats the message of a compiler, an allocator or another process."""
    if isinstance(error, _backend_failed()):
        return False
    module = type(error).__module__
    return module.startswith(("torch._inductor", "triton")) or type(error) is RuntimeError


def _others_hold_memory() -> bool:
    """Return whether other processes use a large share of the device's memory."""
    if not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() > _OTHERS_SHARE * total
