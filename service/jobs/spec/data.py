"""Data sources that a training or verification job can name: the built-in ones, and those of installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from service.jobs.plugins import DataConfig, DataSource, Features, Samples, Tokens
from service.jobs.plugins.catalogue import catalogue
from service.jobs.spec.files import FileArrays, FileTokens


class DigitsData(DataConfig):
    """scikit-learn's 1,797 handwritten digits: 64 features in [0, 1], 10 classes; the last fifth is the test split."""

    source: Literal["digits"] = Field(
        "digits", description="1,797 scans of handwritten digits of 8 × 8 pixels, which scikit-learn brings"
    )

    @property
    def gives(self) -> Samples:
        return Features(features=64, classes=10, limits=(0.0, 1.0))

    @property
    def held_out(self) -> int | None:
        return 1797 // 5


class TokensData(DataConfig):
    """Next-byte prediction on the text of Python's own language reference; the last tenth is the test split."""

    source: Literal["tokens"] = Field("tokens", description="a text that Trivet brings, as bytes")
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
        DataSource(DigitsData, "service.models.data.digits:load"),
        DataSource(TokensData, "service.models.data.corpus:load"),
        DataSource(SyntheticData, "service.models.data.synthetic:load"),
        DataSource(FileTokens, "service.models.data.files:load", variants=(FileArrays,)),
    ),
)

if TYPE_CHECKING:
    DataSpec = DataConfig
else:
    DataSpec = Annotated[SOURCES.union(), Field(discriminator=SOURCES.tag), BeforeValidator(SOURCES.refuse_unavailable)]
