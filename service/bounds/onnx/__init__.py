"""ONNX models as modules that can be traced and bounded like any other."""

from __future__ import annotations

from service.bounds.onnx.model import OnnxModel, load

__all__ = ["OnnxModel", "load"]
