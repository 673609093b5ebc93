"""Reads a query of either version of VNN-LIB, which the first statement tells."""

from __future__ import annotations

from dataclasses import replace

from service.formats.vnnlib.formulas import read_version_1
from service.formats.vnnlib.query import Query, VnnlibError
from service.formats.vnnlib.version2 import DeclaredQuery, is_version_2, read_networks
from service.garbage import uncollected


def parse(text: str) -> Query:
    """Parse a file's text into its query about one network as it is. Raises :class:`VnnlibError`."""
    if not is_version_2(text):
        with uncollected():  # as below
            return read_version_1(text)
    found = parse_networks(text)
    if not found.is_plain:
        raise VnnlibError(
            f"{found.why_not_plain()}, expected one network with one input and one output: "
            "`trivet vnnlib verify` takes more"
        )
    (given, shown) = found.networks[0].tensors
    return replace(found.query, shapes=(given.shape, shown.shape))


def parse_networks(text: str) -> DeclaredQuery:
    """Parse a file of version 2, about any number of networks. Raises :class:`VnnlibError`."""
    with uncollected():  # searching many small objects for garbage takes as long as making them
        return read_networks(text)
