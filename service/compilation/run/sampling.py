"""Chooses the numbers of a tensor to compare: all of a small one; of a large one a sample, and signed sums over
all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, starmap

import torch
from torch import Tensor
from torch.nn import functional

from service.compilation.run.copies import to_host
from service.torch_internals.table import internal

Key = tuple[str, str]
KEPT = 2**16
"""Elements of a tensor that are compared one by one: all gradients of all iterations of all runs are kept at once."""
_SUMS = 2**12
ROWS = 2**8
"""Elements for each sum that are taken at once: they are copied in float64, which must not show in peak memory."""
_ROWS_ON_GPU = 2**12
"""As many on a GPU, where small pieces take long to start, and memory is used by the GiB."""
STATE = "state"
"""The kind of a tensor of a whole state."""
WHOLE = " (whole)"
"""Follows the kind of a tensor whose signed sums are compared."""
_HELD = frozenset({"buffer", "frozen parameter", STATE})
"""The kinds of what only has to stay as it is: of subclasses over other tensors these are compared."""
_LEFT = frozenset({"buffer", "frozen parameter", "input", "parameter"})


def is_left_behind(kind: str) -> bool:
    """Return whether a step leaves tensors of this ``kind`` behind: these follow from its gradients and outputs, which
    are wrong too if it drew otherwise.
    """
    return kind.removesuffix(WHOLE) in _LEFT


def copies_to_compare(members: Iterable[tuple[str, str, Tensor]]) -> dict[Key, Tensor]:
    """Return the compared numbers of tensors, given with their kinds and names, as copies on the host; both parts of
    complex numbers. Modes that watch a program's operators do not see those of the copying, which are many.
    """
    unwatched = internal("torch.utils._python_dispatch._disable_current_modes")
    with unwatched(), internal("torch._C.DisableTorchFunction")():
        return to_host(dict(chain.from_iterable(starmap(_take_numbers, members))))


def has_arithmetic(value: Tensor) -> bool:
    """Return whether numbers with a fraction can be calculated with: torch only holds those of 8 bits."""
    return value.is_floating_point() and value.itemsize > 1


def is_packed(value: Tensor) -> bool:
    """Return whether this rank's part of ``value`` is a tensor subclass over others, such as quantised weights, which
    may have no arithmetic.
    """
    return bool(_names_of_parts(local_part(value)))


def _names_of_parts(local: Tensor) -> Sequence[str]:
    """Return the attributes with the tensors of which a subclass is made; none of a plain one, or one on its way."""
    flatten = getattr(local, "__tensor_flatten__", None)
    return () if flatten is None or local.is_nested or hasattr(local, "trigger_wait") else flatten()[0]


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one type and shape are the same."""
    if parts := _names_of_parts(one):
        return all(is_equal(getattr(one, part), getattr(other, part)) for part in parts)
    is_held = one.is_floating_point() and not has_arithmetic(one)
    return torch.equal(*((each.view(torch.uint8) for each in (one, other)) if is_held else (one, other)))


def _take_numbers(kind: str, name: str, value: Tensor) -> Iterator[tuple[Key, Tensor]]:
    local = local_part(value)
    if kind in _HELD and (names := _names_of_parts(local)):
        for part in names:
            yield from _take_numbers(kind, f"{name}.{part}", getattr(local, part))
        return
    if local.is_nested:
        parts = local.unbind()
        yield (kind, f"{name} (sizes)"), torch.tensor([each.shape for each in parts])
        local = torch.cat([each.flatten() for each in parts]) if parts else torch.zeros(0, dtype=local.dtype)
    if local.layout is not torch.strided:
        local = local.to_dense()
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    sample = _sample(local)
    yield (kind, name), sample.float() if local.is_floating_point() and not has_arithmetic(local) else sample
    if local.numel() > KEPT:
        yield (kind + WHOLE, name), signed_sums(local)


def local_part(value: Tensor) -> Tensor:
    """Return this rank's part of ``value``."""
    to_local = getattr(value, "to_local", None)
    local: Tensor = to_local() if to_local else value
    return local.detach()


def _sample(local: Tensor) -> Tensor:
    """Return a tensor, or of a large one ``KEPT`` elements at most, evenly spread."""
    return local.flatten()[:: _stride(local)] if local.numel() > KEPT else local


def spread(sampled: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of the shape of ``like`` with the elements that :func:`_sample` took where they were taken, and 0
    elsewhere.
    """
    whole = sampled.new_zeros(like.shape)
    whole.view(-1)[:: _stride(like) if like.numel() > KEPT else 1] = sampled.flatten()
    return whole


def _stride(local: Tensor) -> int:
    """Return an odd step, which does not stay in one column of a matrix whose rows have an even length, as in most."""
    return (local.numel() // KEPT + 1) | 1


def signed_sums(local: Tensor) -> Tensor:
    """Return ``_SUMS`` sums of all elements, each under a random sign: of whole numbers the sums themselves, else as
    large as the elements are, in float64.

    Sums of a difference are the difference of the sums, and their mean square is the difference's on average ("tug of
    war", Alon, Matias and Szegedy, 1996): two tensors with the same sums are the same, and not only of one norm.
    """
    flat, is_whole = local.flatten(), not local.is_floating_point()
    rows = -(-flat.numel() // _SUMS)
    signs = _signs(rows, flat.device)
    exact = torch.int64 if is_whole else torch.float64
    total = torch.zeros(_SUMS, dtype=exact, device=flat.device)
    step = ROWS if is_whole or flat.device.type == "cpu" else _ROWS_ON_GPU
    for start in range(0, rows, step):
        part = flat[start * _SUMS : (start + step) * _SUMS].to(exact)
        lacking = -part.numel() % _SUMS
        block = (functional.pad(part, (0, lacking)) if lacking else part).view(-1, _SUMS)
        own = signs[start : start + step]  # a GPU has no products of matrices of whole numbers
        total += (own.to(exact)[:, None] * block).sum(0) if is_whole else own @ block
    return total if is_whole else total / math.sqrt(rows)


@lru_cache(maxsize=256)
def _signs(rows: int, device: torch.device) -> Tensor:
    """Return so many random signs. They stay on the device: bringing them there would wait for its work each time."""
    drawn = torch.randint(0, 2, (rows,), generator=torch.Generator().manual_seed(rows))
    return (2 * drawn - 1).to(device, torch.float64)
