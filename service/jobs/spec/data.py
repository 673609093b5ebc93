"""Data sources that a training or verification job can name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from service.jobs.spec.base import Strict


class DigitsData(Strict):
    """scikit-learn's 1,797 handwritten digits: 64 features in [0, 1], 10 classes; the last fifth is the test split."""

    source: Literal["digits"] = "digits"

    @property
    def features(self) -> int:
        return 64

    @property
    def classes(self) -> int:
        return 10


class TokensData(Strict):
    """Next-byte prediction on the text of Python's own language reference; the last tenth is the test split."""

    source: Literal["tokens"] = "tokens"
    corpus: Literal["python-docs"] = "python-docs"
    sequence: int = Field(64, ge=1, le=2**20, description="tokens per sample")

    @property
    def vocabulary(self) -> int:
        return 256


class SyntheticData(Strict):
    """Points labelled by a fixed random teacher; for tests and benchmarks, not for conclusions."""

    source: Literal["synthetic"] = "synthetic"
    features: int = Field(32, ge=1, le=2**20)
    classes: int = Field(10, ge=2, le=2**20)
    samples: int = Field(4096, ge=16, le=2**28)


ClassData = Annotated[DigitsData | SyntheticData, Field(discriminator="source")]
DataSpec = Annotated[DigitsData | TokensData | SyntheticData, Field(discriminator="source")]
