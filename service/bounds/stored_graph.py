"""Graphs as bytes: JSON for the nodes, safetensors for their constants, and a digest of both.

A graph that was read computes the same bits as the stored one: constants keep the memory order of their entries, on
which the rounding of products depends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from service.bounds.graph import BatchSize, Graph, Node, Ref, Repeated

_NODES = "nodes"
_DIGEST_BYTES = 32
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_PLAIN = (type(None), bool, int, float, str)


class NotStorableError(ValueError):
    """The graph holds an argument that cannot be stored, or the bytes are not those of a graph."""


def to_bytes(graph: Graph) -> bytes:
    """Return the graph as bytes. Raises :class:`NotStorableError` for arguments of other types than graphs have."""
    writer = _Writer()
    nodes = [
        {
            "name": node.name,
            "operator": node.operator,
            "arguments": {name: writer.encoded(value) for name, value in node.arguments.items()},
            "shape": node.shape,
            "input_shapes": node.input_shapes,
            "where": node.where,
            "source": node.source,
        }
        for node in graph.nodes
    ]
    text = torch.frombuffer(bytearray(json.dumps(nodes).encode()), dtype=torch.uint8)
    content = save({**writer.tensors, _NODES: text})
    return hashlib.sha256(content).digest() + content


def from_bytes(content: bytes) -> Graph:
    """Return the graph of :func:`to_bytes`, with its constants on the CPU. Raises :class:`NotStorableError` if
    any byte has changed.
    """
    digest, stored = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(stored).digest() != digest:
        raise NotStorableError("these are not the bytes that were written")
    tensors = load(stored)
    nodes = json.loads(tensors.pop(_NODES).numpy().tobytes())
    reader = _Reader(tensors)
    return Graph(tuple(reader.node(fields) for fields in nodes))


@dataclass(frozen=True)
class _Writer:
    """Collects constants, each once however many nodes have it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[int, dict[str, Any]] = field(default_factory=dict)

    def encoded(self, value: Any) -> Any:
        """Return an argument as JSON; objects stand for types that JSON lacks."""
        found: Any
        match value:
            case torch.device():
                found = {"device": str(value)}
            case _ if isinstance(value, _PLAIN):
                found = value
            case _ if isinstance(value, _OF_TORCH):
                found = {"torch": str(value).removeprefix("torch.")}
            case tuple():
                found = [self.encoded(each) for each in value]
            case list():
                found = {"list": [self.encoded(each) for each in value]}
            case Ref():
                found = {"ref": value.name}
            case BatchSize():
                found = {"batch": True}
            case Repeated():
                found = {"repeated": self.encoded(value.value)}
            case Tensor():
                found = self._constant(value)
            case _:
                raise NotStorableError(f"an argument is {type(value).__name__}")
        return found

    def _constant(self, tensor: Tensor) -> dict[str, Any]:
        """Store a tensor in the order of its memory; dimensions along which it repeats its entries are stored once."""
        if id(tensor) not in self.names:
            strides = tensor.stride()
            order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
            once = tensor.detach()
            for dim in range(tensor.dim()):
                if strides[dim] == 0 and tensor.shape[dim] > 1:
                    once = once.narrow(dim, 0, 1)
            name = str(len(self.tensors))
            # A copy, since several constants may be views of one memory, which safetensors does not store.
            self.tensors[name] = once.permute(order).clone(memory_format=torch.contiguous_format).cpu()
            self.names[id(tensor)] = {"tensor": name, "order": order, "shape": list(tensor.shape)}
        return self.names[id(tensor)]


@dataclass(frozen=True)
class _Reader:
    tensors: Mapping[str, Tensor]
    read: dict[str, Tensor] = field(default_factory=dict)

    def node(self, fields: Mapping[str, Any]) -> Node:
        return Node(
            fields["name"],
            fields["operator"],
            {name: self._decoded(value) for name, value in fields["arguments"].items()},
            tuple(fields["shape"]),
            tuple(map(tuple, fields["input_shapes"])),
            fields["where"],
            fields["source"],
        )

    def _decoded(self, value: Any) -> Any:
        found: Any = value
        match value:
            case list():
                found = tuple(self._decoded(each) for each in value)
            case {"list": values}:
                found = [self._decoded(each) for each in values]
            case {"ref": name}:
                found = Ref(name)
            case {"batch": _}:
                found = BatchSize()
            case {"repeated": once}:
                found = Repeated(self._decoded(once))
            case {"device": name}:
                found = torch.device(name)
            case {"torch": name}:
                found = getattr(torch, name)
            case {"tensor": name, "order": order, "shape": shape}:
                found = self._constant(name, order, shape)
        return found

    def _constant(self, name: str, order: list[int], shape: list[int]) -> Tensor:
        if name not in self.read:
            # A copy, since torch's own memory is aligned, and the bytes of a file may begin anywhere.
            places = [order.index(dim) for dim in range(len(order))]
            self.read[name] = self.tensors[name].clone().permute(places).expand(shape)
        return self.read[name]
