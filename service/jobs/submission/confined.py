"""Runs the process of one check: its limits, the request that it reads, the answer that it writes."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import struct
import traceback
from typing import IO, NoReturn

import psutil

from service.jobs.records import shortened
from service.jobs.submission.request import CheckLimits, request_adapter
from service.linux import die_with_parent

OUT_OF_MEMORY = errno.ENOMEM
"""Exit code of a check that ran out of memory."""
LENGTH = struct.Struct("!Q")
"""The request's length in bytes, which comes before it."""
_MOST_OPEN_FILES = 64
_LONGEST_TRACEBACK = 20_000


def answer(connection: socket.socket, limits: CheckLimits, server: int) -> NoReturn:
    """Answer the requests of ``connection``, one after another, and exit once it is closed, a request has failed or
    the process ``server``, whose fork this is, has ended.

    An answer consists of lines: ``opening`` with the id of each file that is read, then ``answer`` with JSON,
    or ``failed`` with a traceback as JSON. All requests share the limits; the first that is
    reached ends the process: by SIGXCPU, or with the exit code :data:`OUT_OF_MEMORY`.
    """
    code = 0
    reader, writer = connection.makefile("rb"), connection.makefile("wb")

    def tell(word: str, content: bytes) -> None:
        writer.write(word.encode() + b" " + content + b"\n")
        writer.flush()

    try:
        die_with_parent(server)
        _confine(limits)
        while (text := _read(reader)) is not None:
            request = request_adapter.validate_json(text)
            tell("answer", request.answer(lambda file_id: tell("opening", file_id.encode())))
    except MemoryError:
        code = OUT_OF_MEMORY
    except (BrokenPipeError, ConnectionResetError):  # the answer is no longer awaited
        pass
    except BaseException:
        code = 1
        tell("failed", json.dumps(shortened(traceback.format_exc(), _LONGEST_TRACEBACK)).encode())
    os._exit(code)


def _read(stream: IO[bytes]) -> bytes | None:
    """Return the next request; ``None`` after the last one."""
    if len(head := stream.read(LENGTH.size)) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return stream.read(length)


def _confine(limits: CheckLimits) -> None:
    """Limit this process's further memory, its processor time and its open files. It cannot write files."""
    memory = psutil.Process().memory_info().vms + limits.memory_bytes
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MOST_OPEN_FILES),
    ):
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.processor_s, limits.processor_s + 1))
