"""Text to token ids, once for all jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from service.models.build_once import build_once
from service.models.data.packed import TokenFile

CHUNK = 2**20
"""Characters that are tokenised at a time; a chunk ends with a line, unless that is as long again."""
_CUT = "whole chunks"
"""How a text becomes ids: what was cached under another name is not taken."""


def tokenized(text: Path, tokenizer: Path, cache: Path, vocabulary: int) -> TokenFile:
    """Return the ids of a UTF-8 text, from the cache or put there by the first rank while the others wait.

    The text is cut at line ends into pieces of about a mebibyte, which are tokenised one by one without special
    tokens. ``ValueError`` names the field when either file can't be read or the tokenizer has too many tokens.
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
    key = f"{text.name}\n{tokenizer.name}\n{tokenizer_version()}\n{kind}\n{_CUT}"
    path = cache / "tokens" / f"{hashlib.sha256(key.encode()).hexdigest()}.{kind}"

    def write(target: Path) -> None:
        with target.open("wb") as ids:
            for chunk in _chunks(text):
                np.asarray(model.encode(chunk, add_special_tokens=False).ids, dtype=kind).tofile(ids)

    return TokenFile(build_once(path, write), kind)


def tokenizer_version() -> str:
    """Return the library's version: another one may cut the same text otherwise."""
    return version("tokenizers")


def _chunks(text: Path) -> Iterator[str]:
    try:
        with text.open(encoding="utf-8", newline="") as lines:
            while chunk := lines.read(CHUNK) + lines.readline(CHUNK):
                yield chunk
    except UnicodeDecodeError as error:
        raise ValueError(f"data.file is no UTF-8 text: {error}") from error
