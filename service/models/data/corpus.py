"""Reads a text that comes with Python, as bytes."""

from __future__ import annotations

from functools import lru_cache

import torch

from service.jobs.layout import DataLayout
from service.jobs.spec.data import TokensData
from service.models.data.samples import Dataset, Split, divide


def load(spec: TokensData, layout: DataLayout | None) -> Dataset:
    """Return the corpus cut into sequences; the last tenth is the test split. ``ValueError`` if they are too long for
    ten.
    """
    text = torch.frombuffer(bytearray(python_reference()), dtype=torch.uint8).long()
    samples = (len(text) - 1) // spec.sequence
    if samples < 10:
        raise ValueError(
            f"data.sequence={spec.sequence} cuts the corpus of {len(text)} bytes into {samples} samples; "
            f"at most {(len(text) - 1) // 10} leaves ten"
        )
    used = samples * spec.sequence
    inputs, targets = text[:used], text[1 : used + 1]
    return divide(Split(inputs.view(samples, -1), targets.reshape(samples, -1)), held_out=10)


@lru_cache(maxsize=1)
def python_reference() -> bytes:
    """Return the text behind ``help()``: Python's language reference by topic, which varies by version."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte of text that only this source needs
    except ImportError as error:
        raise RuntimeError(
            "data.source 'tokens' reads the standard library's 'pydoc_data', which this Python lacks"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
