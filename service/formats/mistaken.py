"""Recognises files of other formats that users give in place of an ONNX model, and says how to convert them."""

from __future__ import annotations

from collections.abc import Iterable

from service.formats.archive import OF_PICKLE

_EXPORT = "torch.onnx.export(network, sample, 'network.onnx', dynamo=False) writes an ONNX model"
_TORCH = (
    f"was written by torch.save, torch.jit.save or torch.export.save and is not read, since it may run code; {_EXPORT}"
)
_WEIGHTS = (
    f"has weights alone, in safetensors; model: {{safetensors: FILE, family: …}} takes those of a family; {_EXPORT}"
)
_IN_TORCH_ARCHIVES = ("data.pkl", "archive_format")
_FIRST_OF_ONNX = b"\x08"
"""The first byte of each ONNX model: the field of its version."""


def mistaken_for_model(content: bytes) -> str | None:
    """Return the end of a sentence about a file that is no ONNX model; ``None`` if it may be one."""
    if content.startswith(_FIRST_OF_ONNX):
        return None
    if content.startswith(OF_PICKLE):
        return _TORCH
    if content[8:10] == b'{"':
        return _WEIGHTS
    if content.startswith(b"\x89HDF"):
        return "is one of HDF5, as Keras writes it; tf2onnx converts such a model to ONNX"
    if b"(declare-" in content[:65536]:
        return "is a query in VNN-LIB, which belongs in property.vnnlib"
    return None


def mistaken_archive(names: Iterable[str]) -> str | None:
    """Return the same about an archive that holds no ONNX model, by the names in it."""
    return _TORCH if any(name in _IN_TORCH_ARCHIVES for name in names) else None
