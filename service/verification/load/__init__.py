"""Load a verification job by its source: a trained job's model, an ONNX file, or an archive of instances.

Each source has a file of its own, which reads the model and its property, checks that they fit each other, and
prepares the model for bounding; :mod:`.task_loader` is what they share.
"""

from __future__ import annotations

import torch

from service.bounds.stages import StageLink
from service.jobs.runtime import RunContext
from service.jobs.spec.verify import FromOnnx, InstancesProperty, VerifySpec, VnnlibProperty
from service.parallel.mesh import build as build_mesh
from service.verification.load.instances import load_instances
from service.verification.load.onnx import chosen_source, load_onnx, with_labels_if_asked
from service.verification.load.task_loader import LoadedTasks, TaskLoader
from service.verification.load.trace_cache import TraceCache
from service.verification.load.trained import load_trained
from service.verification.properties import Property, read


def load_tasks(spec: VerifySpec, context: RunContext, device: torch.device) -> LoadedTasks:
    """Return a task for each model of the job; of several models, those that cannot be bounded are told apart.

    So is a model that is too large for this rank's memory, where no other rank waits for it. Raises
    :class:`~service.bounds.graph.UnsupportedModelError` or ``PropertyError`` when no model or the property can be done.
    """
    mesh = build_mesh(spec.parallel, context.device_type)
    loader = TaskLoader(
        spec, mesh, device, StageLink(mesh, device), report=context.report, traces=TraceCache(context.host_cache)
    )
    if isinstance(spec.property, InstancesProperty):
        return loader.collected(list(load_instances(spec.property.instances, context.data, loader)))
    if isinstance(spec.model, FromOnnx):
        property_spec = spec.property
        source = chosen_source(spec.model, context.data)

        def asked(sizes: tuple[int, int]) -> Property:
            return read(property_spec, *sizes, context.data)

        if isinstance(property_spec, VnnlibProperty):
            source = with_labels_if_asked(source, asked)
        loaded = load_onnx(source, loader, asked)
    else:
        loaded = load_trained(context.data, loader)
    return loader.collected([loaded])


__all__ = ["LoadedTasks", "load_tasks"]
