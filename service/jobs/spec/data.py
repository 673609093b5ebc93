"""Data sources that a training or verification job can name."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

from pydantic import Field, model_validator

from service.jobs.spec.base import FileId, Strict
from service.jobs.spec.samples import Features, Samples, Tokens


class DigitsData(Strict):
    """scikit-learn's 1,797 handwritten digits: 64 features in [0, 1], 10 classes; the last fifth is the test split."""

    source: Literal["digits"] = "digits"

    @property
    def gives(self) -> Samples:
        return Features(features=64, classes=10)

    @property
    def held_out(self) -> int | None:
        return 1797 // 5


class TokensData(Strict):
    """Next-byte prediction on the text of Python's own language reference; the last tenth is the test split."""

    source: Literal["tokens"] = "tokens"
    corpus: Literal["python-docs"] = "python-docs"
    sequence: int = Field(64, ge=1, le=2**20, description="tokens per sample")

    @property
    def gives(self) -> Samples:
        return Tokens(vocabulary=256, sequence=self.sequence)

    @property
    def held_out(self) -> int | None:
        return None


class SyntheticData(Strict):
    """Points labelled by a fixed random teacher; for tests and benchmarks, not for conclusions."""

    source: Literal["synthetic"] = "synthetic"
    features: int = Field(32, ge=1, le=2**20)
    classes: int = Field(10, ge=2, le=2**20)
    samples: int = Field(4096, ge=16, le=2**28)

    @property
    def gives(self) -> Samples:
        return Features(self.features, self.classes)

    @property
    def held_out(self) -> int | None:
        return self.samples // 5


class FileData(Strict):
    """An uploaded file: packed token ids, or arrays of samples with class labels. Samples reach a model flat."""

    source: Literal["file"] = "file"
    format: Literal["tokens", "arrays"]
    file: FileId
    test_file: FileId | None = Field(None, description="a part of the file is held out when absent")
    tokenizer: FileId | None = Field(None, description="tokens: a tokenizer for a file of text")
    sequence: int | None = Field(None, ge=1, le=2**20, description="tokens: tokens per sample")
    vocabulary: int | None = Field(None, ge=2, le=2**24, description="tokens: one more than the largest id")
    shape: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] | None = Field(
        None, min_length=1, max_length=4, description="arrays: shape of one sample"
    )
    classes: int | None = Field(None, ge=2, le=2**20, description="arrays: one more than the largest label")

    @property
    def gives(self) -> Samples:
        """What the spec says of the file; a rank compares it with the file itself."""
        if self.format == "tokens":
            return Tokens(self.vocabulary or 0, self.sequence or 0)
        return Features(prod(self.shape or ()), self.classes or 0)

    @property
    def held_out(self) -> int | None:
        return None

    @model_validator(mode="after")
    def _fields_of_the_format(self) -> FileData:
        own = {"tokens": ("sequence", "vocabulary"), "arrays": ("shape", "classes")}
        for name in own[self.format]:
            if getattr(self, name) is None:
                raise ValueError(f"format {self.format} needs '{name}'")
        foreign = {"tokens": ("shape", "classes"), "arrays": ("sequence", "vocabulary", "tokenizer")}
        for name in foreign[self.format]:
            if getattr(self, name) is not None:
                raise ValueError(f"format {self.format} has no '{name}'")
        return self


ClassData = Annotated[DigitsData | SyntheticData, Field(discriminator="source")]
DataSpec = Annotated[DigitsData | TokensData | SyntheticData | FileData, Field(discriminator="source")]
