"""Data sources of training and verification jobs: built-in, uploaded, or from an installed package."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from service.jobs.plugins import DataConfig, DataSource, Features, FileId, Samples, Tokens, disagreement
from service.jobs.plugins.catalogue import catalogue

_TestFraction = Annotated[
    float,
    Field(
        gt=0,
        le=1,
        description="share of the samples kept for testing, from the end, unless there is a test_file or a test split "
        "in the file; 1 where nothing learns, as in a verification",
    ),
]


class FileTokens(DataConfig):
    """Token ids in one long row, cut into sequences; a target is the token after its input.

    The file is a flat array (``uint8`` reads any file as bytes), an array in NumPy's format, or UTF-8 text for
    ``tokenizer``, a ``tokenizer.json``. It is read in place.
    """

    source: Literal["file"] = Field("file", description="an uploaded file")
    format: Literal["tokens"] = Field("tokens", description="tokens: one sequence that is cut into samples")
    file: FileId = Field(description="the id of the upload")
    encoding: Literal["uint8", "uint16", "uint32", "npy", "text"] = Field(
        "uint16", description="encoding of the token ids in the file; text: not ids yet, but text with its tokenizer"
    )
    tokenizer: FileId | None = Field(None, description="the id of a tokenizer.json, for the encoding text")
    sequence: int = Field(ge=1, le=2**20, description="tokens per sample")
    vocabulary: int = Field(ge=2, le=2**24, description="number of token ids; every id is below it")
    test_file: FileId | None = Field(None, description="the id of an upload for testing, of the same encoding")
    test_fraction: _TestFraction = 0.1

    @property
    def gives(self) -> Samples:
        return Tokens(self.vocabulary, self.sequence)

    @property
    def ignores(self) -> bool:
        return False

    @model_validator(mode="after")
    def _text_has_a_tokenizer(self) -> FileTokens:
        if (self.encoding == "text") != (self.tokenizer is not None):
            message = f"encoding={self.encoding} has {'none' if self.tokenizer else 'one'}"
            expected = "the id of a tokenizer.json with encoding=text, and null with another encoding"
            raise disagreement("tokenizer", message, self.tokenizer, expected)
        return self


class FileArrays(DataConfig):
    """Arrays ``inputs`` (n, …) and ``targets`` (n,) in a safetensors or npz file; targets are class labels.

    ``test_inputs`` and ``test_targets`` are the test split if the file has them. Samples reach a model flat, as
    float32, their ``axes`` in the order that the model reads; uint8 pixels are divided by 255. A safetensors file is
    read in place, an npz as a whole.
    """

    source: Literal["file"] = Field("file", description="an uploaded file")
    format: Literal["arrays"] = Field("arrays", description="arrays: inputs and class labels")
    file: FileId = Field(description="the id of the upload")
    shape: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] = Field(
        min_length=1, max_length=4, description="of one sample, as the file has it"
    )
    axes: tuple[Annotated[int, Field(ge=0, le=3)], ...] | None = Field(
        None,
        description="the axes of shape in the order in which the model reads them: [2, 0, 1] for pictures that are "
        "stored as (H, W, C); the file's order when absent",
    )
    classes: int = Field(ge=2, le=2**20, description="number of classes; every label is below it")
    test_file: FileId | None = Field(
        None, description="the id of an upload for testing, with arrays inputs and targets"
    )
    test_fraction: _TestFraction = 0.2

    @property
    def gives(self) -> Samples:
        return Features(prod(self.shape), self.classes, shape=self.read_shape)

    @property
    def ignores(self) -> bool:
        return False

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Return the shape of one sample as a model reads it."""
        return self.shape if self.axes is None else tuple(self.shape[axis] for axis in self.axes)

    @model_validator(mode="after")
    def _axes_of_the_shape(self) -> FileArrays:
        every = list(range(len(self.shape)))
        if self.axes is not None and sorted(self.axes) != every:
            message = f"shape={list(self.shape)} has {len(every)} axes"
            raise disagreement("axes", message, list(self.axes), f"each of {', '.join(map(str, every))} once, or null")
        return self


class DigitsData(DataConfig):
    """scikit-learn's 1,797 handwritten digits: 64 features in [0, 1], 10 classes; the last fifth is the test split."""

    source: Literal["digits"] = Field(
        "digits", description="1,797 scans of handwritten digits of 8 × 8 pixels, from scikit-learn"
    )

    @property
    def gives(self) -> Samples:
        return Features(features=64, classes=10, limits=(0.0, 1.0))

    @property
    def held_out(self) -> int | None:
        return 1797 // 5


class TokensData(DataConfig):
    """Next-byte prediction on the text of Python's own language reference; the last tenth is the test split."""

    source: Literal["tokens"] = Field("tokens", description="a built-in text, as bytes")
    corpus: Literal["python-docs"] = Field("python-docs", description="the language reference of Python")
    sequence: int = Field(64, ge=1, le=2**20, description="tokens per sample")

    @property
    def gives(self) -> Samples:
        return Tokens(vocabulary=256, sequence=self.sequence)


class SyntheticData(DataConfig):
    """Points labelled by a fixed random teacher; for tests and benchmarks, not for conclusions."""

    source: Literal["synthetic"] = Field("synthetic", description="random points")
    features: int = Field(32, ge=1, le=2**20, description="numbers in an input")
    classes: int = Field(10, ge=2, le=2**20, description="of the labels")
    samples: int = Field(4096, ge=16, le=2**28, description="training and test samples together")

    @property
    def gives(self) -> Samples:
        return Features(self.features, self.classes)

    @property
    def held_out(self) -> int | None:
        return self.samples // 5


SOURCES = catalogue(
    DataSource,
    (
        DataSource(DigitsData, "service.models.data.sources:load_digits"),
        DataSource(TokensData, "service.models.data.sources:load_tokens"),
        DataSource(SyntheticData, "service.models.data.sources:load_synthetic"),
        DataSource(FileTokens, "service.models.data.files:load", variants=(FileArrays,)),
    ),
)

if TYPE_CHECKING:
    DataSpec = DataConfig
else:
    DataSpec = SOURCES.choice()
