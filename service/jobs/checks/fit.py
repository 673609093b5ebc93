"""Checks whether model, data and property fit each other."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.plugins import Features, ModelConfig, Tokens
from service.jobs.records import Problem
from service.jobs.spec.data import DataSpec
from service.jobs.spec.model import FromHuggingFace, FromJob, ModelRef, TransformerConfig
from service.jobs.spec.train import ExportSpec
from service.jobs.spec.verify import Box, BoxProperty, FromOnnx, Robustness, RobustnessProperty, VerifySpec


def check_property(spec: VerifySpec, config: ModelConfig) -> Iterator[Problem]:
    """Yield why the property does not fit this model."""
    reads = config.reads
    if isinstance(reads, Tokens) and _asks_for_tokens(spec, config):
        assert isinstance(spec.property, RobustnessProperty)
        yield from _check_robustness(spec.property.robustness, spec.model, config)
    elif isinstance(reads, Tokens):
        path = f"model.{_form(spec.model)}"
        message = "token ids have no box around them to certify"
        yield Problem(path, message, config.family, "a model that reads features")
    elif isinstance(spec.property, BoxProperty):
        yield from _check_box(spec.property.box, reads)
    elif isinstance(spec.property, RobustnessProperty):
        yield from _check_robustness(spec.property.robustness, spec.model, config)


def _asks_for_tokens(spec: VerifySpec, config: ModelConfig) -> bool:
    """Return whether the property is about embedded tokens, the only box for a model that reads ids."""
    checked_property = spec.property
    about_tokens = isinstance(checked_property, RobustnessProperty) and isinstance(
        checked_property.robustness.data.gives, Tokens
    )
    return about_tokens and isinstance(config, TransformerConfig)


def _form(model: ModelRef | FromOnnx | None) -> str:
    """Return the name of the field that names the model."""
    if isinstance(model, FromJob):
        return "job"
    return "huggingface" if isinstance(model, FromHuggingFace) else "family"


def check_export(export: ExportSpec, config: ModelConfig) -> Iterator[Problem]:
    """Yield why the trained model cannot be exported as the spec asks."""
    if export.huggingface is not None and not isinstance(config, TransformerConfig):
        message = f"Hugging Face's libraries have no model like the family {config.family}"
        yield Problem("export.huggingface", message, export.huggingface, "null, or a transformer")


def check_data(data: DataSpec, path: str, model: object, config: ModelConfig) -> Iterator[Problem]:
    """Yield why a model cannot read such data.

    ``model`` is the spec's reference to it, ``config`` the family's configuration behind the reference.
    """
    model_path = None if isinstance(model, FromJob | FromHuggingFace) else "model"
    gives, reads = data.gives, config.reads
    if isinstance(gives, Tokens) and isinstance(reads, Tokens):
        yield from _check_tokens(data.source, path, gives, reads, model_path)
    elif isinstance(gives, Features) and isinstance(reads, Features):
        given = (("features", gives.features), ("classes", gives.classes))
        built = ((reads.features_field, reads.features), (reads.classes_field, reads.classes))
        for (name, size), (field, wanted) in zip(given, built, strict=True):
            message = f"the model has {field or name}={wanted}, the data has {name}={size}"
            if size != wanted and model_path is None:
                yield Problem(path, message, size, str(wanted))
            elif size != wanted:
                yield Problem(f"{model_path}.{field}" if field else str(model_path), message, wanted, str(size))
    else:
        wanted_kind = "tokens" if isinstance(reads, Tokens) else "features"
        message = f"a model of family {config.family} reads {wanted_kind}"
        yield Problem(f"{path}.source", message, data.source, f"a source of {wanted_kind}")


def _check_tokens(source: str, path: str, gives: Tokens, reads: Tokens, model_path: str | None) -> Iterator[Problem]:
    longest, vocabulary = reads.sequence_field or "the longest sequence", reads.vocabulary_field or "vocabulary"
    if gives.sequence > reads.sequence:
        message = f"sequence={gives.sequence} is longer than the model's {longest}={reads.sequence}"
        yield Problem(f"{path}.sequence", message, gives.sequence, f"at most {reads.sequence}")
    if reads.vocabulary < gives.vocabulary:
        message = f"the data has {gives.vocabulary} tokens, the model has {vocabulary}={reads.vocabulary}"
        where = f"{path}.source" if model_path is None else f"{model_path}.{vocabulary}"
        got = source if model_path is None else reads.vocabulary
        yield Problem(where, message, got, f"{vocabulary} of at least {gives.vocabulary}")


def _check_box(box: Box, reads: Features) -> Iterator[Problem]:
    if len(box.lower) != reads.features:
        inputs = reads.features_field or "features"
        message = f"the box has {len(box.lower)} dimensions, the model has {inputs}={reads.features}"
        yield Problem("property.box.lower", message, len(box.lower), f"{reads.features} numbers")
    for index, halfspace in enumerate(box.output):
        if (length := len(halfspace.coefficients)) != reads.classes:
            message = f"{length} coefficients for {reads.classes_field or 'classes'}={reads.classes}"
            path = f"property.box.output.{index}.coefficients"
            yield Problem(path, message, length, f"{reads.classes} numbers")


def _check_robustness(robustness: Robustness, model: object, config: ModelConfig) -> Iterator[Problem]:
    data = robustness.data
    yield from check_data(data, "property.robustness.data", model, config)
    if data.held_out is not None and robustness.count > data.held_out:
        message = f"the test split of {data.source} has {data.held_out} samples"
        yield Problem("property.robustness.count", message, robustness.count, f"at most {data.held_out}")
