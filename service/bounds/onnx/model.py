"""A module that computes what an ONNX model computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from service.bounds.graph import UnsupportedModelError, annotated
from service.bounds.onnx.converters import CONVERTERS
from service.bounds.onnx.places import KEEPING
from service.bounds.onnx.quantised import saturation
from service.bounds.onnx.reading import CannotRunError, Description, Runtime, describe, parse
from service.bounds.operators.conversion import ABSENT, Array, Call, ChosenPlaces, Converted, Found, Value
from service.formats.onnx import advice, first_line

CHECKED_INPUTS, NEARBY = 6, 64
TOLERANCE, OF_HALVES = 1e-4, 1e-2
"""Relative to the largest output: what sums in another order, or in float32, may differ by; and float16 anywhere."""


class OnnxModel(nn.Module):
    """``(instances, features)`` to ``(instances, outputs)``: each instance is one run of the model at a batch of one.

    Inputs and outputs are flattened, several outputs side by side in the model's order. Weights are buffers in float32;
    ``double()`` gives the function that has the file's own weights in float64.
    """

    names_operations = True
    """Whether a trace of it knows the file's names of nodes."""

    def __init__(self, description: Description, floats: Mapping[str, Tensor] | None = None) -> None:
        """``floats`` are the constants of floating-point numbers in one type, where they are at hand."""
        super().__init__()
        self._description = description
        # Of a model without weights, the type and the device in which it is traced.
        self.register_buffer("type_of_all", torch.empty(0))
        self._names: dict[str, str] = {}
        for index, (name, array) in enumerate(description.constants.items()):
            if is_float(array):
                self._names[name] = f"constant_{index}"
                held = torch.from_numpy(array.astype(np.float32)) if floats is None else floats[name]
                self.register_buffer(self._names[name], held)

    def double(self) -> Self:
        super().double()
        for name, buffer in self._names.items():
            exact = torch.from_numpy(self._description.constants[name].astype(np.float64))
            self.get_buffer(buffer).copy_(exact)
        return self

    @property
    def features(self) -> int:
        return self._description.sizes[0]

    @property
    def outputs(self) -> int:
        return self._description.sizes[1]

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the names of the outputs in the file."""
        return self._description.outputs

    @property
    def remedy(self) -> str:
        """Return advice for a model that onnxruntime computes differently; empty if there is none."""
        return saturation(self._description.calls, self._description.constants)

    def forward(self, x: Tensor) -> Tensor:
        shapes = self._description.shapes
        first = shapes[self._description.input]
        known = {self._description.input: Value(first, x.reshape(-1, *first))}
        for call in self._description.calls:
            values = [self._value(name, known) if name else ABSENT for name in call.inputs]
            with annotated(call.name):
                found = _converted(call, values, shapes.get(call.outputs[0], ()))
            given = [found] if isinstance(found, Tensor | ChosenPlaces) else found
            for name, tensor in zip(call.outputs, given, strict=False):
                if name not in self._description.constants:  # as those without entries are
                    known[name] = _value_of(call, values, shapes.get(name, ()), tensor)
        results = [known[name].float.reshape(-1, prod(shapes[name])) for name in self._description.outputs]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def _value(self, name: str, known: dict[str, Value]) -> Value:
        if name in known:
            return known[name]
        if name not in self._description.constants:
            raise UnsupportedModelError(f"{name!r} is an output that its node is not bounded with")
        array = self._description.constants[name]
        tensor = self.get_buffer(self._names[name]) if name in self._names else None
        return Value(tuple(array.shape), tensor, array)


def _value_of(call: Call, values: Sequence[Value], shape: tuple[int, ...], found: Found) -> Value:
    """Return a node's output; numbers that are moved as they are keep what is known of their places."""
    if isinstance(found, ChosenPlaces):
        return Value(shape, found.numbers, places=found.truths)
    given = values[0].places if call.operator in KEEPING else None
    return Value(shape, found, places=None if given is None else given.reshape(-1, *shape, given.shape[-1]))


def _converted(call: Call, values: Sequence[Value], shape: tuple[int, ...]) -> Converted:
    """Return a node's outputs. An error over its inputs or attributes becomes a refusal that names it."""
    try:
        return CONVERTERS[call.operator](call, values, shape)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise call.refuse(f"it cannot be computed: {first_line(error)}") from error


def is_float(array: Array) -> bool:
    """Return whether a type is floating-point, of any width; numpy knows bfloat16 only as a type of ours."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def load(data: bytes) -> OnnxModel:
    """Return the model of an ONNX file's content, in float64 if that is its own type and else in float32, checked
    against onnxruntime on random inputs.

    Raises :class:`UnsupportedModelError` that names the operator and its node where it cannot be done.
    """
    return load_both(data)[0]


def load_both(data: bytes) -> tuple[OnnxModel, Runtime]:
    """Return what :func:`load` does, and the model in onnxruntime that it was checked against."""
    proto = parse(data)
    model, runtime = model_of(describe(proto)), Runtime.of(proto)
    if runtime.dtype == np.float64:
        model = model.double()
    check(model, model.features, runtime, everywhere=False, remedy=model.remedy)
    return model, runtime


def model_of(description: Description, floats: Mapping[str, Tensor] | None = None) -> OnnxModel:
    """Raises :class:`UnsupportedModelError` that names the operators that there are no converters for."""
    unknown = [call for call in description.calls if call.operator not in CONVERTERS]
    if unknown:
        words = (f"{call}{advice(call.operator, call.inputs)}" for call in unknown)
        raise UnsupportedModelError(f"no rule for {', '.join(words)}")
    return OnnxModel(description, floats).eval()


class RunsInstances(Protocol):
    """Something that onnxruntime runs, one instance at a time."""

    def flat(self, instance: Array) -> Array:
        """Return all outputs for one flat instance, side by side, in float64."""


class Running(RunsInstances, Protocol):
    """A model in onnxruntime; ``dtype`` is its input's, and ``precision`` the half one of numbers within it, if any."""

    @property
    def dtype(self) -> type[np.floating[Any]]:
        """Return the type of the input."""

    @property
    def precision(self) -> str | None:
        """Return the half precision of numbers within the model, if any."""


def check(
    model: Callable[[Tensor], Tensor], features: int, runtime: Running, *, everywhere: bool = True, remedy: str = ""
) -> None:
    """Compare with onnxruntime on random inputs, ``everywhere`` or where it takes them; a refusal adds the ``remedy``.

    The model takes float32, or float64 where that is its own type. Ranks that have it together all call this.
    """
    kind = np.float64 if runtime.dtype == np.float64 else np.float32
    inputs = np.random.default_rng(0).normal(size=(CHECKED_INPUTS, features)).astype(kind)
    inputs[0] = 0
    if not everywhere:
        inputs = inputs[[_runs(runtime, each) for each in inputs]]
    check_at(model, torch.from_numpy(inputs), runtime, remedy)


def _runs(runtime: Running, instance: Array) -> bool:
    try:
        runtime.flat(instance)
    except CannotRunError:
        return False
    return True


@torch.no_grad()
def check_at(model: Callable[[Tensor], Tensor], inputs: Tensor, runtime: Running, remedy: str = "") -> float:
    """Compare with onnxruntime at inputs ``(n, features)``: all instances at once here, one by one there, as batches
    must not matter. Return the largest difference. Ranks that have the model together all call this.
    """
    expected = np.stack([runtime.flat(instance.cpu().numpy()) for instance in inputs])
    found = model(inputs).cpu().numpy()
    tolerance = OF_HALVES if runtime.precision else TOLERANCE
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=1.0)
    close = np.isclose(found, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    for index in np.flatnonzero(~close.all(axis=1)):
        near = model(_nearby(inputs[index])).cpu().numpy()
        slack = tolerance * scale + tolerance * np.abs(expected[index])
        within = (near.min(axis=0) - slack <= expected[index]) & (expected[index] <= near.max(axis=0) + slack)
        if not (close[index] | within).all():
            worst = np.nanmax(np.abs(found[index] - expected[index]))
            where = ", ".join(f"{entry:.9g}" for entry in inputs[index, :6].tolist())
            raise UnsupportedModelError(
                f"the imported model differs from onnxruntime by {worst:.3g} at the input ({where}"
                f"{', …' if len(inputs[index]) > 6 else ''}){remedy}"
            )
    differences = np.abs(found - expected)
    return float(differences[np.isfinite(differences)].max(initial=0.0))


def _nearby(x: Tensor) -> Tensor:
    """Return inputs about as far from ``x`` ``(features,)`` as rounding in another order may move what is computed: at
    a jump both sides are right.
    """
    signs = np.random.default_rng(1).choice([-1.0, 1.0], size=(NEARBY, len(x)))
    step = 16 * torch.finfo(torch.float32).eps * (x.abs() + x.abs().amax().clamp(min=1e-3))
    return x + torch.from_numpy(signs).to(x) * step
