"""Compares values on which all ranks must agree before they wait for each other: a rank that differs would never
arrive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_DIGEST_BYTES = 16
_LENGTH_BYTES = 8
_SHOWN = 200
"""The characters of a value that a message shows."""


class DisagreementError(RuntimeError):
    """Ranks have different values for the same thing; all of them raise it, with the same words."""


def agree(values: Mapping[str, object]) -> None:
    """Raise :class:`DisagreementError` on every rank unless each gives the same ``values``, by name.

    Every rank of the job calls it at the same point. Values are compared as text. One exchange of a few bytes through
    the host, also where the ranks compute on CUDA: no device is waited for.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = {name: str(value) for name, value in values.items()}
    digest = hashlib.blake2b(json.dumps(own).encode(), digest_size=_DIGEST_BYTES).digest()
    if len(set(_gathered(digest, _DIGEST_BYTES))) == 1:
        return
    text = json.dumps({name: _shortened(value) for name, value in own.items()}).encode()
    lengths = _gathered(len(text).to_bytes(_LENGTH_BYTES), _LENGTH_BYTES)
    texts = _gathered(text, max(map(int.from_bytes, lengths)))
    raise DisagreementError(_difference([json.loads(each.rstrip(b"\0")) for each in texts]))


def _gathered(own: bytes, length: int) -> list[bytes]:
    """Return the values of all ranks, padded with zeros to ``length``."""
    mine = torch.tensor(list(own.ljust(length, b"\0")), dtype=torch.uint8)
    found: list[Tensor] = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [bytes(each.tolist()) for each in found]


def _shortened(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"


def _difference(by_rank: Sequence[Mapping[str, str]]) -> str:
    """Return the first difference; the ones that follow from it help nobody."""
    for name in dict.fromkeys(name for values in by_rank for name in values):
        found = [values.get(name, "nothing") for values in by_rank]
        if len(set(found)) > 1:
            return f"the ranks disagree on {name}: {_by_value(found)}"
    return "the ranks disagree on a value that is too long to be shown"


def _by_value(values: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(f"{value} on rank {' and '.join(found)}" for value, found in ranks.items())
