"""Data from uploaded files, by format."""

from __future__ import annotations

import hashlib
from pathlib import Path

from service.jobs.layout import DataLayout
from service.jobs.spec.files import FileArrays, FileTokens
from service.models.data import arrays, packed
from service.models.data.samples import Dataset, Samples
from service.models.data.text import tokenized, tokenizer_version


def load(spec: FileTokens | FileArrays, layout: DataLayout | None) -> Dataset:
    """Return samples that stay on disk."""
    train, test = _tokens(spec, layout) if isinstance(spec, FileTokens) else _arrays(spec, layout)
    return Dataset(train, test, _digest(spec))


def _digest(spec: FileTokens | FileArrays) -> str:
    """Return the digest of the spec, since a file's id is the hash of its content, and of what else decides how a text
    is cut.
    """
    cut_by = tokenizer_version() if isinstance(spec, FileTokens) and spec.tokenizer is not None else ""
    return hashlib.sha256(f"{spec.model_dump_json()}{cut_by}".encode()).hexdigest()


def _tokens(spec: FileTokens, layout: DataLayout | None) -> tuple[Samples, Samples]:
    train = packed.open_tokens(_token_file(spec, spec.file, "file", layout), spec, "data.file")
    if spec.test_file is None:
        return packed.divide(train, spec.test_fraction)
    return train, packed.open_tokens(_token_file(spec, spec.test_file, "test_file", layout), spec, "data.test_file")


def _token_file(spec: FileTokens, file: str, field: str, layout: DataLayout | None) -> packed.TokenFile:
    path = uploaded(layout, file, f"data.{field}")
    if layout is None or spec.tokenizer is None:
        return packed.TokenFile(path, spec.encoding)
    tokenizer = uploaded(layout, spec.tokenizer, "data.tokenizer")
    return tokenized(path, tokenizer, layout.cache, spec.vocabulary)


def _arrays(spec: FileArrays, layout: DataLayout | None) -> tuple[Samples, Samples]:
    held = arrays.read(uploaded(layout, spec.file, "data.file"), "data.file")
    if spec.test_file is not None:
        other = arrays.read(uploaded(layout, spec.test_file, "data.test_file"), "data.test_file")
        return arrays.samples(held, spec, "", "data.file"), arrays.samples(other, spec, "", "data.test_file")
    if arrays.TEST + arrays.INPUTS in held:
        return arrays.samples(held, spec, "", "data.file"), arrays.samples(held, spec, arrays.TEST, "data.file")
    return arrays.divide(arrays.samples(held, spec, "", "data.file"), spec.test_fraction)


def uploaded(layout: DataLayout | None, file: str, field: str) -> Path:
    """Return where an uploaded file lies. Raises ``ValueError`` naming the field when it is not there."""
    path = None if layout is None else layout.file(file)
    if path is None or not path.is_file():
        raise ValueError(f"{field}: there is no uploaded file {file} in the data directory")
    return path
