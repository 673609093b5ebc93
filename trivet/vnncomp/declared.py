"""Checks that networks fit what a query of VNN-LIB 2 declares, and writes a witness by its declarations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod

from service.formats.vnnlib import DeclaredNetwork, DeclaredQuery, DeclaredTensor, are_in_one_order, shown_shape
from trivet.vnncomp.answers import Witness, WitnessFormatError
from trivet.vnncomp.instances import BenchmarkError
from trivet.vnncomp.witness import FoundTensor, ReplayedNetwork

_ONNX_NAMES = {"float32": "FLOAT", "float64": "DOUBLE"}
_HEADER = re.compile(r"(\S+)\s+(\S+)\s+\[([\d,\s]*)\]")


def check_fit(query: DeclaredQuery, network: ReplayedNetwork) -> None:
    """Raise :class:`BenchmarkError` if a network, or all of them side by side, takes or gives other tensors than the
    query declares: in number, type or shape.
    """
    found = network.given, network.shown()
    for roles, (takes, there) in zip((("input",), ("hidden", "output")), enumerate(found), strict=True):
        declared = [each for network in query.networks for each in network.having(*roles)]  # type: ignore[arg-type]
        own = there[: len(there) - takes * query.compares_inputs * len(found[0])]
        if len(declared) != len(own):
            does = "gives" if takes else "takes"
            raise BenchmarkError(f"the query declares {len(declared)} {roles[-1]}s, the network {does} {len(own)}")
        for tensor, has in zip(declared, own, strict=True):
            _check_tensor(tensor, has)


def _check_tensor(declared: DeclaredTensor, found: FoundTensor) -> None:
    where = f"line {declared.line}: {declared.name} is {declared.kind} {shown_shape(declared.shape)}"
    is_alike = prod(found.shape) == declared.size and are_in_one_order(found.shape, declared.shape)
    if not is_alike or not (declared.is_real or found.kind == declared.kind.lower()):
        raise BenchmarkError(f"{where}, and in the network {found.kind} {shown_shape(found.shape)}")


@dataclass(frozen=True)
class DeclaredWitness(Witness):
    """A witness of VNN-LIB 2: each declared tensor by its name, type and shape, then its entries, each on a line."""

    networks: tuple[DeclaredNetwork, ...] = ()

    def tensors(self) -> list[tuple[DeclaredTensor, tuple[float, ...]]]:
        """Return each tensor's entries, in the order of the declarations."""
        inputs, outputs = iter(self.inputs), iter(self.outputs)
        return [
            (tensor, tuple(islice(inputs if tensor.role == "input" else outputs, tensor.size)))
            for network in self.networks
            for tensor in network.tensors
        ]

    def text(self) -> str:
        lines = []
        for tensor, values in self.tensors():
            lines.append(f"{tensor.name} {tensor.kind} {shown_shape(tensor.shape)}")
            whole = "int" in tensor.kind
            lines.extend(repr(int(value) if whole else value) for value in values)
        return "\n".join(lines) + "\n"

    def serialised(self) -> Iterator[tuple[str, bytes]]:
        """Yield each tensor's name and its content as an ONNX tensor; one of the type real is of float64."""
        import numpy as np  # noqa: PLC0415 - as is onnx: few witnesses become files
        from onnx import TensorProto, helper  # noqa: PLC0415

        for tensor, values in self.tensors():
            kind = "DOUBLE" if tensor.is_real else _ONNX_NAMES.get(tensor.kind.lower(), tensor.kind.upper())
            whole = [int(value) for value in values] if "int" in tensor.kind else list(values)
            entries = np.array(whole, helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(kind)))
            made = helper.make_tensor(
                tensor.name, TensorProto.DataType.Value(kind), tensor.shape, entries.tobytes(), True
            )
            yield tensor.name, made.SerializeToString()


def read_witness(text: str, networks: Sequence[DeclaredNetwork]) -> DeclaredWitness:
    """Read a witness of VNN-LIB 2. Raises :class:`WitnessFormatError`."""
    lines = iter([line.strip() for line in text.splitlines() if line.strip()])
    values: dict[bool, list[float]] = {True: [], False: []}
    for tensor in (tensor for network in networks for tensor in network.tensors):
        header, expected = next(lines, ""), f"{tensor.name} {tensor.kind} {shown_shape(tensor.shape)}"
        match = _HEADER.fullmatch(header)
        shape = "".join(match[3].split()) if match else ""
        if match is None or (match[1], f"[{shape}]") != (tensor.name, shown_shape(tensor.shape)):
            raise WitnessFormatError(f"got {header[:60]!r} in a witness, expected {expected}")
        entries = list(islice(lines, tensor.size))
        try:
            values[tensor.role == "input"] += map(float, entries)
        except ValueError:
            raise WitnessFormatError(f"an entry of {tensor.name} in a witness is no number") from None
        if len(entries) != tensor.size:
            raise WitnessFormatError(f"{tensor.name} has {len(entries)} entries in a witness, expected {tensor.size}")
    return DeclaredWitness(tuple(values[True]), tuple(values[False]), tuple(networks))
