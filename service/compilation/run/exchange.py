"""Hands results from the first of several processes that needs them to the others, through files in memory.

A result is plain data and tensors, whose numbers lie beside the pickled rest: they are written and read without
another copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_HEAD = struct.Struct("QQ")
"""Where the pickled rest of a result begins and ends; zeros until all is written."""
_ALIGNED = 64
_SHARE = 0.25
"""The share of the host's free memory that a result may take."""


def _do_nothing() -> None:
    """Do nothing while another process makes a result."""


class Exchange(Protocol):
    """Where several processes that need the same results find them."""

    def obtain(self, name: str, make: Callable[[], T], meanwhile: Callable[[], object] = _do_nothing) -> tuple[T, bool]:
        """Return the result of this name, and whether this process made it: the first to ask does; others call
        ``meanwhile`` and wait.
        """


@dataclass(frozen=True)
class FileExchange:
    """An exchange among processes that have inherited its files. What one of them left half-made, by an error or its
    end, the next makes anew; what is too large, each makes.
    """

    locks: int
    """A file of which a byte is locked for each name, from the second on: locks end with their process."""
    files: Sequence[int]
    names: Sequence[str]
    waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Entered while another process makes a result."""

    def has_any(self, phase: str) -> bool:
        """Return whether another process has left results of a phase."""
        return any(os.fstat(file).st_size for file, name in zip(self.files, self.names, strict=True) if phase in name)

    def obtain(self, name: str, make: Callable[[], T], meanwhile: Callable[[], object] = _do_nothing) -> tuple[T, bool]:
        place = self.names.index(name)
        file = self.files[place]
        with locked(self.locks, place + 1, self.waiting, meanwhile):
            found = _read(file)
            if found is None:
                made = make()
                _write(file, (made,))
                return made, True
        return (found[0], False) if found else (make(), True)


@contextlib.contextmanager
def locked(
    file: int,
    byte: int,
    waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    meanwhile: Callable[[], object] = _do_nothing,
) -> Iterator[None]:
    """Keep other processes from locking this byte, within. If one of them has, call ``meanwhile`` and enter ``waiting``
    until it lets it.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except BlockingIOError:
        meanwhile()
        with waiting():
            fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


class _Pickler(pickle.Pickler):
    """Pickles everything but the numbers of tensors, and chooses their places."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, tuple[Tensor, int]] = {}
        self.end = _aligned(_HEAD.size)

    def persistent_id(self, held: Any) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
        if not isinstance(held, Tensor) or held.layout is not torch.strided:
            return None
        if id(held) not in self.tensors:
            self.tensors[id(held)] = held, self.end
            self.end = _aligned(self.end + held.nbytes)
        return self.tensors[id(held)][1], held.dtype, tuple(held.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, flat: Tensor) -> None:
        super().__init__(io.BytesIO(content))
        self.flat = flat

    def persistent_load(self, place: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
        return _part(self.flat, *place)


def _write(file: int, result: tuple[Any, ...]) -> None:
    """Write a result; of one that is too large, or holds what cannot be pickled, only that there is one."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(result)
    except (pickle.PicklingError, TypeError, AttributeError):
        return _write(file, ())
    total = pickler.end + stream.tell()
    if result and total > _SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return _write(file, ())
    os.ftruncate(file, total)
    region = mmap.mmap(file, total)
    flat = torch.frombuffer(region, dtype=torch.uint8)
    for tensor, place in pickler.tensors.values():
        _part(flat, place, tensor.dtype, tuple(tensor.shape)).copy_(tensor.detach())
    region[pickler.end :] = stream.getvalue()
    region[: _HEAD.size] = _HEAD.pack(pickler.end, total)
    return None


def _read(file: int) -> tuple[Any, ...] | None:
    """Return a result, whose tensors are this process's own as soon as it writes to them; ``None`` if there is none."""
    total = os.fstat(file).st_size
    if not total:
        return None
    region = mmap.mmap(file, total, access=mmap.ACCESS_COPY)
    begin, end = _HEAD.unpack(region[: _HEAD.size])
    if not end:
        return None
    flat = torch.frombuffer(region, dtype=torch.uint8)
    found: tuple[Any, ...] = _Unpickler(region[begin:end], flat).load()
    return found


def _part(flat: Tensor, place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return flat[place : place + dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED
