"""The table of data sources. A new one is a module with ``load(spec, layout)``, its spec, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from service.jobs.layout import DataLayout
from service.jobs.spec.data import DataSpec
from service.models.data import corpus, digits, files, synthetic
from service.models.data.samples import Dataset

Loader = Callable[[Any, DataLayout | None], Dataset]
"""From the source's own spec and the folder with uploaded files (``None``: there are none) to its samples, on the CPU
or on disk. Every rank calls it, and gets the same samples; what can't be read raises ``ValueError`` with the field.
"""

LOADERS: dict[str, Loader] = {
    "digits": digits.load,
    "tokens": corpus.load,
    "synthetic": synthetic.load,
    "file": files.load,
}


def load(spec: DataSpec, layout: DataLayout | None = None) -> Dataset:
    """The data set that ``spec`` names."""
    if spec.source not in LOADERS:
        raise ValueError(f"data.source={spec.source!r}; expected one of {', '.join(sorted(LOADERS))}")
    return LOADERS[spec.source](spec, layout)
