"""Collects the compiler's own structured trace in the form of ``TORCH_TRACE``; ``tlparse`` reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from service.torch_internals.table import internal


@contextmanager
def traced(folder: Path) -> Iterator[None]:
    """Write the trace of compilations within into ``folder``, a file for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = internal("torch._logging._internal")
    handler: Any = logs.LazyTraceHandler(str(folder))
    handler.setFormatter(logs.TorchLogsFormatter(trace=True))
    logs.trace_log.addHandler(handler)
    try:
        yield
    finally:
        logs.trace_log.removeHandler(handler)
        handler.close()
