"""Checks whether uploaded ONNX models and VNN-LIB queries can be read, and fit each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from service.formats.vnnlib import (
    Bundle,
    NotThereError,
    Query,
    VnnlibError,
    are_in_one_order,
    bundle,
    parse,
    shown_shape,
    sources,
)
from service.jobs.checks.fit import check_count, check_shapes
from service.jobs.plugins import Features, ModelConfig
from service.jobs.records import Problem
from service.jobs.spec.verify import (
    BoxProperty,
    FromOnnx,
    InstancesProperty,
    RobustnessProperty,
    VerifySpec,
    VnnlibProperty,
)

if TYPE_CHECKING:
    from service.formats.onnx import Outline

MOST_SHOWN = 10
"""The most problems of one archive: the first ones mostly explain the rest."""
_PathOf = Callable[[str], Path | None]


def check_queries(spec: VerifySpec, config: ModelConfig | None, path_of: _PathOf) -> Iterator[Problem]:
    """Yield the problems of uploaded models and queries, including those that do not fit each other."""
    if isinstance(spec.property, InstancesProperty):
        yield from _check_instances(spec.property, path_of, divided=spec.parallel.tp * spec.parallel.pp > 1)
        return
    try:
        model = _outline(spec, config, path_of)
    except ValueError as error:
        assert isinstance(spec.model, FromOnnx)
        yield _unreadable(error, spec.model)
        return
    if isinstance(spec.model, FromOnnx) and model is not None:
        yield from _check_rules("model.onnx", "", model, spec.model.onnx)
    if isinstance(spec.property, VnnlibProperty):
        for path, file in spec.property.files:
            if (content := path_of(file)) is not None:
                yield from _check_file(path, file, content, model)
    elif isinstance(spec.model, FromOnnx) and model is not None:
        yield from _check_sizes(spec.property, model)


def _unreadable(error: ValueError, model: FromOnnx) -> Problem:
    from service.formats.onnx import ChoiceError  # noqa: PLC0415 - brings onnx, which only these jobs need

    if isinstance(error, ChoiceError):
        return Problem(error.field, str(error), model.choices()[error.field.removeprefix("model.")], error.expected)
    return Problem("model.onnx", str(error), model.onnx, "an ONNX model of numbers")


def _check_rules(path: str, where: str, model: Outline, file: str) -> Iterator[Problem]:
    if model.unsupported:
        more = len(model.unsupported) - MOST_SHOWN
        named = ", ".join(model.unsupported[:MOST_SHOWN]) + (f" and {more} more nodes" if more > 0 else "")
        message = f"{where}no rule for {named}"
        expected = "a model without them"
        if model.instead:
            expected = (
                f"model.outputs that need none of them, such as {', '.join(map(repr, model.instead[:MOST_SHOWN]))}"
            )
        yield Problem(path, message, file, expected)


def _check_instances(instances: InstancesProperty, path_of: _PathOf, *, divided: bool) -> Iterator[Problem]:
    """Yield why an archive's pairs cannot be verified.

    A model that cannot be bounded becomes rows with that reason, unless it is ``divided`` over ranks, or the only one.
    """
    if (content := path_of(instances.instances)) is None:
        return
    expected = "a zip or an uncompressed tar of instances.csv and the ONNX and VNN-LIB files that it names"
    try:
        with bundle(content) as opened:
            models: dict[str, Outline | None] = {}
            misfits = (
                Problem("property.instances", *each) for each in _misfits_of(opened, instances.instances, models)
            )
            yield from islice(misfits, MOST_SHOWN)
            without = [(name, model) for name, model in models.items() if model is not None and model.unsupported]
            if divided or len(without) == len(models):
                for name, model in without[:MOST_SHOWN]:
                    yield from _check_rules("property.instances", f"{name}: ", model, instances.instances)
    except VnnlibError as error:
        yield Problem("property.instances", str(error), instances.instances, expected)


def _misfits_of(opened: Bundle, file: str, models: dict[str, Outline | None]) -> Iterator[tuple[str, str, str]]:
    """Yield messages, the file, and what is expected; each query is read once, and each model, into ``models``."""
    from service.formats.onnx import LARGEST_READ, outline_of  # noqa: PLC0415 - brings onnx, see above

    queries: dict[str, Query] = {}
    for pair in opened.pairs:
        try:
            if pair.model not in models:
                data = opened.model(pair, LARGEST_READ)
                models[pair.model] = None if data is None else outline_of(data)
            if pair.query not in queries:
                query = parse(opened.text(pair))
                queries[pair.query] = replace(query, disjuncts=query.disjuncts[:1])  # the only questions of a check
        except NotThereError as error:
            yield str(error), file, "every file that instances.csv names"
            continue
        except ValueError as error:
            broken = pair.query if pair.model in models else pair.model
            yield f"line {pair.line}, {broken}: {error}", file, "one ONNX model of numbers, and VNN-LIB 1 or 2.0"
            continue
        for message, expected in _misfits(queries[pair.query], models[pair.model]):
            yield f"line {pair.line}, {pair.name}: {message}", file, expected


def _outline(spec: VerifySpec, config: ModelConfig | None, path_of: _PathOf) -> Outline | None:
    from service.formats.onnx import Outline, chosen, outline  # noqa: PLC0415 - brings onnx, which only these jobs need

    if isinstance(spec.model, FromOnnx):
        content = path_of(spec.model.onnx)
        return None if content is None else outline(content, partial(chosen, model=spec.model))
    reads = None if config is None else config.reads
    return Outline(reads.features, reads.classes, shape=reads.shape) if isinstance(reads, Features) else None


def _check_file(path: str, file: str, content: Path, model: Outline | None) -> Iterator[Problem]:
    try:
        found = sources(content)
    except VnnlibError as error:
        yield Problem(path, str(error), file, "VNN-LIB as text, its gzip, or a zip or an uncompressed tar of such")
        return
    shown = 0
    for source in found:
        if shown == MOST_SHOWN:
            return
        where = f"{source.name}: " if source.name else ""
        try:
            query = parse(source.text)
        except VnnlibError as error:
            yield Problem(path, f"{where}{error}", file, "a query in VNN-LIB 1 or 2.0")
            shown += 1
            continue
        for message, expected in _misfits(query, model):
            yield Problem(path, f"{where}{message}", file, expected)
            shown += 1


def _misfits(query: Query, model: Outline | None) -> Iterator[tuple[str, str]]:
    if not query.disjuncts:
        yield "no input satisfies its bounds on inputs, so there is nothing to verify", "a box with an input in it"
    if model is None or (query.inputs == model.inputs and _is_about(query.outputs, model)):
        if model is not None and model.is_unclear(query.outputs):
            yield model.why_unclear, model.to_be_clear
        if model is not None and query.shapes is not None:
            yield from _check_order("input", query.shapes[0], model.shape)
            yield from _check_order("output", query.shapes[1], model.output_shape)
        return
    outputs = "" if model.outputs is None else f" and gives {model.outputs}"
    last = "" if model.outputs is None else f", Y_0 to Y_{model.outputs - 1}"
    last += f", which are of {', '.join(model.names[:MOST_SHOWN])}" if model.names else ""
    message = (
        f"the query has {query.inputs} inputs and {query.outputs} outputs, the model takes {model.inputs}{outputs}"
    )
    yield message, f"X_0 to X_{model.inputs - 1}{last}"


def _check_order(role: str, declared: Sequence[int], own: Sequence[int] | None) -> Iterator[tuple[str, str]]:
    """Yield a misfit if entries that the query numbers by its shape are others of the model."""
    if own is not None and prod(own) == prod(declared) and not are_in_one_order(declared, own):
        message = f"the query declares its {role} as {shown_shape(declared)}, the model's is {shown_shape(own)}"
        yield message, f"{shown_shape(own)}, with or without axes of length 1, or [{prod(own)}]"


def _is_about(outputs: int, model: Outline) -> bool:
    """Return whether a query may be about so many outputs: the bounded ones, or those with the labels."""
    return model.outputs in (None, outputs) or (model.has_labels and model.every in (None, outputs))


def _check_sizes(checked_property: BoxProperty | RobustnessProperty, model: Outline) -> Iterator[Problem]:
    if isinstance(checked_property, BoxProperty):
        if (given := len(checked_property.box.lower)) != model.inputs:
            message = f"the box has {given} dimensions, the model takes {model.inputs} inputs"
            yield Problem("property.box.lower", message, given, f"{model.inputs} numbers")
        for index, halfspace in enumerate(checked_property.box.output):
            if model.outputs not in (None, length := len(halfspace.coefficients)):
                message = f"{length} coefficients, the model gives {model.outputs} outputs"
                path = f"property.box.output.{index}.coefficients"
                yield Problem(path, message, length, f"{model.outputs} numbers")
        return
    data = checked_property.robustness.data
    gives = data.gives
    yield from check_count(checked_property.robustness)
    path = "property.robustness.data.source"
    if not isinstance(gives, Features):
        yield Problem(path, "the data has no classes", data.source, "a source of labelled features")
    elif gives.features != model.inputs:
        message = f"the data has {gives.features} features, the model takes {model.inputs} inputs"
        yield Problem(path, message, gives.features, str(model.inputs))
    else:
        reads = Features(model.inputs, gives.classes, shape=model.shape)
        yield from check_shapes(data, "property.robustness.data", gives, reads)
        if model.outputs is not None and gives.classes > model.outputs:
            message = f"the data has {gives.classes} classes, the model gives {model.outputs} outputs"
            yield Problem(path, message, gives.classes, f"at most {model.outputs}")
