"""Loading the data that a spec names; the table of sources is ``service.jobs.spec.data.SOURCES``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from service.jobs.layout import DataLayout
from service.jobs.spec.data import SOURCES, DataSpec
from service.models.data.samples import Dataset
from service.models.dotted import dotted

Loader = Callable[[Any, DataLayout | None], Dataset]
"""Maps the source's own spec and the folder with uploaded files (``None``: there are none) to its samples, on the CPU
or on disk. Every rank calls it, and gets the same samples; what can't be read raises ``ValueError`` with the field.
"""


def load(spec: DataSpec, layout: DataLayout | None = None) -> Dataset:
    """Return the data set that ``spec`` names."""
    if spec.source not in SOURCES.provided:
        raise ValueError(f"data.source={spec.source!r}; expected one of {', '.join(sorted(SOURCES.provided))}")
    loader: Loader = dotted(SOURCES.provided[spec.source].declaration.loader)
    return loader(spec, layout)
