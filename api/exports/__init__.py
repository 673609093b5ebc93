"""Exports jobs to other services, live and when they end: one file per service, and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from api.exports.base import Exporter
from api.exports.mlflow import MlflowExporter
from api.exports.otlp import OtlpExporter
from api.exports.tensorboard import TensorBoardExporter
from api.exports.wandb import WandbExporter

EXPORTERS: Mapping[str, Callable[[], Exporter]] = {
    "mlflow": MlflowExporter,
    "otlp": OtlpExporter,
    "tensorboard": TensorBoardExporter,
    "wandb": WandbExporter,
}
"""Makers of exporters by the fields of :class:`~service.jobs.spec.common.notify.ExportTargets`."""
