"""Reads the files of an instance into the question that a job answers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from service.formats.declared import MisfitError, contents_by_network, join_declared
from service.formats.vnnlib import (
    DeclaredNetwork,
    DeclaredQuery,
    Query,
    VnnlibError,
    is_version_2,
    parse,
    parse_networks,
    written,
)
from trivet.vnncomp.answers import Witness
from trivet.vnncomp.declared import DeclaredWitness, check_fit, read_witness
from trivet.vnncomp.instances import BenchmarkError, content, there
from trivet.vnncomp.witness import ReplayedNetwork

Device = Literal["auto", "cpu", "cuda"]
_MOST_DOMAINS = 10**9
"""As many as a budget takes: the competition limits time alone."""


@dataclass(frozen=True)
class Question:
    """The files of an instance, gzipped or not, and the query that was read.

    A query of VNN-LIB 2 has its ``networks``. Several of them, or more than the inputs and outputs of one, lie side by
    side in one file of the ``scratch`` folder, and the query about it in another.
    """

    name: str
    onnx: Path
    vnnlib: Path
    query: Query
    networks: tuple[DeclaredNetwork, ...] = ()
    scratch: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def read(cls, category: str, onnx: Mapping[str | None, Path], vnnlib: Path) -> Question:
        """Read a query and its networks, by their names in it; a single one needs none. Raises
        :class:`BenchmarkError`.
        """
        name = f"{category} {' '.join(path.name for path in onnx.values())} {vnnlib.name}"
        try:
            text = content(vnnlib).decode("utf-8-sig")
            if is_version_2(text):
                return _read_declared(name, onnx, vnnlib, parse_networks(text))
            query = parse(text)
        except (VnnlibError, UnicodeDecodeError) as error:
            raise BenchmarkError(f"{vnnlib}: {error}") from error
        except MisfitError as error:
            raise BenchmarkError(str(error)) from error
        if len(onnx) != 1:
            raise BenchmarkError(f"{vnnlib} is VNN-LIB 1, about one network, and there are {len(onnx)}")
        (network,) = onnx.values()
        return cls(name, there(network), there(vnnlib), query)

    def spec(self, upload: Callable[[Path], str], device: Device, seconds: float) -> dict[str, Any]:
        """Return the job of the instance, after the upload of its files."""
        return {
            "kind": "verify",
            "name": self.name[:100],
            "model": {"onnx": upload(self.onnx)},
            "property": {"vnnlib": upload(self.vnnlib)},
            "method": "beta-crown",
            "device": device,
            "budget": {"seconds": seconds, "domains": _MOST_DOMAINS},
        }

    def own_witness(self, found: Witness) -> Witness:
        """Return a witness as the query's version has it."""
        return DeclaredWitness(found.inputs, found.outputs, self.networks) if self.networks else found

    def parse_witness(self, text: str) -> Witness:
        """Read a witness in the query's version. Raises :class:`WitnessFormatError`."""
        return read_witness(text, self.networks) if self.networks else Witness.parse(text)


def _read_declared(name: str, onnx: Mapping[str | None, Path], vnnlib: Path, declared: DeclaredQuery) -> Question:
    contents = contents_by_network(declared, {each: content(path) for each, path in onnx.items()})
    made = partial(Question, name, query=declared.query, networks=declared.networks)
    if declared.is_plain:
        check_fit(declared, ReplayedNetwork(contents[0]))
        (path,) = onnx.values()
        return made(onnx=there(path), vnnlib=there(vnnlib))
    together = join_declared(declared, contents)
    check_fit(declared, ReplayedNetwork(together))
    scratch = tempfile.TemporaryDirectory(prefix="trivet-")
    files = Path(scratch.name, "networks.onnx"), Path(scratch.name, "query.vnnlib")
    files[0].write_bytes(together)
    files[1].write_text(written(declared.query))
    return made(onnx=files[0], vnnlib=files[1], scratch=scratch)
