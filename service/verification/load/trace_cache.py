"""Keeps traces of networks on this host for later jobs of the same owner.

A trace takes half a second of a processor for a few operators, as much as the whole search of a typical small
query. It depends on the model's content, its type and device, and the tracing code, and is named by them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from service.bounds.graph import Graph, Repeated
from service.bounds.stored_graph import NotStorableError, from_bytes, to_bytes
from service.jobs.files import atomic_write, used

FOLDER = "traces"
LARGEST = 64 << 20
"""Bytes beyond which a trace is not kept: bounds of so many weights take far longer than the trace."""
_TRACED_BY = ("bounds", "formats", "parallel")
"""Folders of the sources that a trace depends on."""

logger = logging.getLogger(__name__)


def _code() -> str:
    """Return a digest of the code that reads and traces models, since other code makes other traces."""
    digest = hashlib.sha256(sys.version.encode())
    for package in ("torch", "onnx", "onnxruntime"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    service = Path(__file__).parents[2]
    for folder in _TRACED_BY:
        for path in sorted((service / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(service)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


CODE = _code()
"""Computed with the import, once in the process that ranks are forked from, which ends when a source changes."""


@dataclass(frozen=True)
class TraceCache:
    """Keeps traces in a folder that only the jobs of one owner can write in; keeps none without a folder."""

    folder: Path | None = None

    def graph(self, model: str, dtype: torch.dtype, device: torch.device, trace: Callable[[], Graph]) -> Graph:
        """Return the trace of a model, named by its content, for bounds in this type on this device;
        ``trace()`` makes it if none is kept, or the kept one cannot be read.
        """
        if self.folder is None:
            return trace()
        name = hashlib.sha256(f"{model}\n{dtype} {device}\n{CODE}".encode()).hexdigest()
        path = self.folder / FOLDER / name
        kept = _read_graph(path)
        if kept is not None:
            return kept.to(device)
        graph = trace()
        if _bytes_of(graph) <= LARGEST:
            _keep(path, graph)
        return graph


def _read_graph(path: Path) -> Graph | None:
    try:
        graph = from_bytes(path.read_bytes())
        used(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # another job left it, in whatever form
        logger.warning("a kept trace cannot be read, and is made anew: %s", error)
        return None
    return graph


def _keep(path: Path, graph: Graph) -> None:
    """Keep a trace for later jobs. An error here, such as a full disk, must not fail this job."""
    with contextlib.suppress(OSError, NotStorableError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        atomic_write(path, to_bytes(graph))


def _bytes_of(graph: Graph) -> int:
    constants = [each for node in graph.nodes for each in _constants(tuple(node.arguments.values()))]
    return sum({id(each): each.nbytes for each in constants}.values())


def _constants(value: Any) -> Iterator[torch.Tensor]:
    match value:
        case torch.Tensor():
            yield value
        case Repeated():
            yield value.value
        case tuple() | list():
            for each in value:
                yield from _constants(each)
