"""Tells services that people use beside this one of ended jobs: a file for each, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from api.exports.base import Exporter
from api.exports.mlflow import MlflowExporter
from api.exports.otlp import OtlpExporter
from api.exports.tensorboard import TensorBoardExporter

EXPORTERS: Mapping[str, Exporter] = {
    "mlflow": MlflowExporter(),
    "otlp": OtlpExporter(),
    "tensorboard": TensorBoardExporter(),
}
"""By the fields of :class:`~service.jobs.spec.notify.ExportTargets`."""
