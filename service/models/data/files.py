"""Data from uploaded files, by format; text is tokenized once for all jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from service.formats.arrays import TEST, has_test_split
from service.jobs.files import DataLayout
from service.jobs.spec.data import FileArrays, FileTokens
from service.models.data import arrays, packed
from service.models.data.sources import Dataset, Samples
from service.parallel.distributed import build_once


def load(spec: FileTokens | FileArrays, layout: DataLayout | None) -> Dataset:
    """Return samples that stay on disk."""
    train, test = _tokens(spec, layout) if isinstance(spec, FileTokens) else _arrays(spec, layout)
    return Dataset(train, test, _digest(spec))


def _digest(spec: FileTokens | FileArrays) -> str:
    """Return the digest of the spec, in which a file's id is its hash, and of the tokenizer's version."""
    cut_by = _tokenizer_version() if isinstance(spec, FileTokens) and spec.tokenizer is not None else ""
    # Without axes that stay, as runs that began before there was such a field have it.
    own = {"axes"} if isinstance(spec, FileArrays) and spec.axes is None else set()
    return hashlib.sha256(f"{spec.model_dump_json(exclude=own)}{cut_by}".encode()).hexdigest()


def _tokens(spec: FileTokens, layout: DataLayout | None) -> tuple[Samples, Samples]:
    train = _open_tokens(spec, spec.file, "data.file", layout)
    if spec.test_file is None:
        return packed.divide(train, spec)
    return train, _open_tokens(spec, spec.test_file, "data.test_file", layout)


def _open_tokens(spec: FileTokens, file: str, field: str, layout: DataLayout | None) -> packed.PackedTokens:
    path = _path_of_upload(layout, file, field)
    encoding: str = spec.encoding
    if layout is not None and spec.tokenizer is not None:
        tokenizer = _path_of_upload(layout, spec.tokenizer, "data.tokenizer")
        path, encoding = _tokenize(path, tokenizer, layout.cache, spec.vocabulary)
    return packed.open_tokens(path, encoding, spec, field)


def _arrays(spec: FileArrays, layout: DataLayout | None) -> tuple[Samples, Samples]:
    held = arrays.read(_path_of_upload(layout, spec.file, "data.file"), "data.file")
    train, has_own = arrays.samples(held, spec, "", "data.file"), has_test_split(held, spec)
    if spec.test_file is not None:
        other = arrays.read(_path_of_upload(layout, spec.test_file, "data.test_file"), "data.test_file")
        return train, arrays.samples(other, spec, "", "data.test_file")
    if has_own:
        return train, arrays.samples(held, spec, TEST, "data.file")
    return arrays.divide(train)


def _path_of_upload(layout: DataLayout | None, file: str, field: str) -> Path:
    """Return the path of an uploaded file. Raises ``ValueError`` naming the field if it is missing."""
    path = None if layout is None else layout.file(file)
    if path is None or not path.is_file():
        raise ValueError(f"{field}: there is no uploaded file {file} in the data directory")
    return path


CHUNK = 2**20
"""Characters that are tokenised at a time; a chunk ends with a line, unless that makes it twice as long."""
_CUT = "whole chunks"
"""The way in which a text becomes ids; a new one needs a new name, so that no cached file of the old one is read."""


def _tokenize(text: Path, tokenizer: Path, cache: Path, vocabulary: int) -> tuple[Path, str]:
    """Return the ids of a UTF-8 text, from the cache; the first rank fills it while the others wait.

    The text is cut at line ends into pieces of about a mebibyte, which are tokenised one by one without special tokens.
    ``ValueError`` names the field when either file cannot be read or the tokenizer has too many tokens.
    """
    # Imported here, as only this needs it.
    import tokenizers  # noqa: PLC0415

    try:
        model = tokenizers.Tokenizer.from_file(str(tokenizer))
    except Exception as error:
        raise ValueError(f"data.tokenizer is no tokenizer.json: {error}") from error
    model.no_truncation()  # the file may set both, for single sentences
    model.no_padding()
    size = model.get_vocab_size(with_added_tokens=True)
    if size > vocabulary:
        raise ValueError(f"data.tokenizer has {size} tokens; data.vocabulary={vocabulary} must be at least that")
    kind = "uint16" if vocabulary <= 2**16 else "uint32"
    # Uploaded files are named by their hash.
    key = f"{text.name}\n{tokenizer.name}\n{_tokenizer_version()}\n{kind}\n{_CUT}"
    path = cache / "tokens" / f"{hashlib.sha256(key.encode()).hexdigest()}.{kind}"

    def write(target: Path) -> None:
        with target.open("wb") as ids:
            for chunk in _chunks(text):
                row = np.asarray(model.encode(chunk, add_special_tokens=False).ids, dtype=np.int64)
                packed.check_ids(row, vocabulary, "data.tokenizer gives", "are its ids without holes?")
                row.astype(kind).tofile(ids)

    return build_once(path, write), kind


def _tokenizer_version() -> str:
    """Return the library's version: another one may cut the same text differently."""
    return version("tokenizers")


def _chunks(text: Path) -> Iterator[str]:
    try:
        with text.open(encoding="utf-8", newline="") as lines:
            while chunk := lines.read(CHUNK) + lines.readline(CHUNK):
                yield chunk
    except UnicodeDecodeError as error:
        raise ValueError(f"data.file is no UTF-8 text: {error}") from error
