"""Lets the ranks of a group find each other, and take objects from each other only.

Ranks exchange pickled objects (``all_gather_object``; checkpoint planning does it too) over connections on which anyone
who reaches a listening port may speak. An object is therefore unpickled only when its message authentication code was
made with the group's secret, which lies in a folder that no other user can read.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from service.jobs import rendezvous_folder
from service.jobs.rendezvous_folder import RendezvousError

_DIGEST = "sha256"
_SIGNATURE = hashlib.new(_DIGEST).digest_size


def join(folder: Path, world_size: int) -> distributed_c10d.Store:
    """Return the store of the group that meets in ``folder``; this process then takes objects of its group only."""
    authenticate_objects(rendezvous_folder.secret(folder))
    return dist.FileStore(str(folder / rendezvous_folder.RANKS), world_size)  # type: ignore[attr-defined]


def authenticate_objects(secret: bytes) -> None:
    """Make torch's object collectives sign what they pickle with ``secret``, and unpickle nothing else."""
    if not (hasattr(distributed_c10d, "_pickler") and hasattr(distributed_c10d, "_unpickler")):
        raise RendezvousError("this version of torch pickles objects in another way; Trivet knows 2.11 to 2.13")
    private: Any = distributed_c10d
    private._pickler = partial(_SigningPickler, secret=secret)
    private._unpickler = partial(_CheckingUnpickler, secret=secret)


class _SigningPickler:
    """A :class:`pickle.Pickler` that writes an HMAC-SHA256 of the pickle before it."""

    def __init__(self, file: IO[bytes], *, secret: bytes) -> None:
        self._file, self._secret = file, secret

    def dump(self, value: Any) -> None:
        """Write ``value``."""
        content = pickle.dumps(value)
        self._file.write(hmac.digest(self._secret, content, _DIGEST) + content)


class _CheckingUnpickler:
    """Reads what :class:`_SigningPickler` wrote with the same secret; anything else raises :class:`RendezvousError`."""

    def __init__(self, file: IO[bytes], *, secret: bytes) -> None:
        self._file, self._secret = file, secret

    def load(self) -> Any:
        """Return the object that was pickled."""
        signature, content = self._file.read(_SIGNATURE), self._file.read()
        if not hmac.compare_digest(signature, hmac.digest(self._secret, content, _DIGEST)):
            raise RendezvousError("an object came from a process that is not in this group, and was not unpickled")
        return pickle.Unpickler(BytesIO(content)).load()  # noqa: S301 - it is this group's own
