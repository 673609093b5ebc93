"""A user's own ONNX file in onnxruntime, as the user runs it: nothing is rewritten, and it is optimised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import helper

from service.bounds.graph import UnsupportedModelError
from service.bounds.onnx.reading import CannotRunError
from service.bounds.operators.conversion import Array
from service.formats.onnx import batch_of_one, first_line, inputs_of, read_message, with_outputs


@dataclass(eq=False)
class OwnFile:
    """A file's content, which is read when it is first run. Raises :class:`UnsupportedModelError` if onnxruntime
    does not load it, and :class:`CannotRunError` for inputs that it refuses.
    """

    read: Callable[[], bytes]
    outputs: Sequence[str]
    """The names of those that are bounded."""

    def flat(self, instance: Array) -> Array:
        """Return all outputs that are bounded for one flat instance, side by side, in float64."""
        session, inputs = self._session
        given, start = dict[str, Array](), 0
        for name, shape, kind in inputs:
            count = int(np.prod(shape))
            numbers = instance[start : start + count].reshape(shape)
            given[name], start = _in_type(numbers, kind), start + count
        try:
            found = session.run(list(self.outputs), given)
        except Exception as error:  # onnxruntime raises types of its own, one for each status code
            raise CannotRunError(f"onnxruntime cannot run the file: {first_line(error)}") from error
        return np.concatenate([np.asarray(each).reshape(-1).astype(np.float64) for each in found])

    @cached_property
    def _session(self) -> tuple[Any, list[tuple[str, tuple[int, ...], np.dtype[Any]]]]:
        import onnxruntime  # noqa: PLC0415 - it starts a thread, which a process to be forked must not have

        model = _with_named_outputs(read_message(self.read()), self.outputs)
        inputs = [
            (each.name, batch_of_one(each), helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type))
            for each in inputs_of(model)
        ]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise UnsupportedModelError(f"onnxruntime cannot load the file: {first_line(error)}") from error
        return session, inputs


def _in_type(numbers: Array, kind: np.dtype[Any]) -> Array:
    """Return numbers as an input takes them: of integers the nearest ones, and the ends of their type beyond it."""
    if kind.kind not in "iu":
        return numbers.astype(kind)
    ends = np.iinfo(kind)
    return np.clip(np.floor(numbers.astype(np.float64) + 0.5), ends.min, ends.max).astype(kind)


def _with_named_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return the model with these outputs, in this order; a map of scores is replaced by the tensor behind it."""
    own = {output.name: output for output in model.graph.output}
    return with_outputs(model, (own.get(name) or helper.make_empty_tensor_value_info(name) for name in names))
