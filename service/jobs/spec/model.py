"""Model references: a built-in family with its configuration, or what a training job produced.

A family is declared once, here, without torch: its configuration (checked at submit) and the dotted name of
its builder, which only ranks import.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from service.jobs.spec.base import JobId, ParallelSpec, Strict


class MlpConfig(Strict):
    """A fully connected classifier: ``in_features → hidden… → out_features``."""

    family: Literal["mlp"] = "mlp"
    in_features: int = Field(ge=1, le=2**24)
    hidden: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] = Field((64, 64), min_length=1, max_length=1024)
    out_features: int = Field(ge=1, le=2**24)
    activation: Literal["relu", "gelu", "tanh"] = "relu"

    def check_parallel(self, parallel: ParallelSpec) -> list[tuple[str, str, Any, str]]:
        """Reasons why this model cannot be cut this way, as (path, message, got, expected)."""
        problems: list[tuple[str, str, Any, str]] = []
        blocks = len(self.hidden)
        if parallel.pp > blocks:
            problems.append(
                (
                    "parallel.pp",
                    f"an mlp with {blocks} hidden layers has {blocks} places for a stage",
                    parallel.pp,
                    f"at most {blocks}",
                )
            )
        for index, width in enumerate(self.hidden):
            if width % parallel.tp:
                problems.append(
                    (
                        f"model.hidden.{index}",
                        f"{width} hidden features do not divide by tp={parallel.tp}",
                        width,
                        f"a multiple of {parallel.tp}",
                    )
                )
        return problems


class TransformerConfig(Strict):
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    family: Literal["transformer"] = "transformer"
    vocab_size: int = Field(256, ge=2, le=2**24)
    dim: int = Field(64, ge=2, le=2**20)
    layers: int = Field(2, ge=1, le=4096)
    heads: int = Field(4, ge=1, le=4096)
    kv_heads: int | None = Field(None, ge=1, le=4096, description="key/value heads; as many as heads when absent")
    ffn_dim: int | None = Field(None, ge=1, le=2**24, description="SwiGLU width; 4·dim when absent")
    max_sequence: int = Field(128, ge=1, le=2**24)
    norm_eps: float = Field(1e-5, gt=0)
    rope_theta: float = Field(10_000.0, gt=0)

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def feed_forward_dim(self) -> int:
        return 4 * self.dim if self.ffn_dim is None else self.ffn_dim

    @model_validator(mode="after")
    def _heads_divide(self) -> TransformerConfig:
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} does not divide into heads={self.heads}")
        if (self.dim // self.heads) % 2:
            raise ValueError(f"dim/heads = {self.dim // self.heads} must be even for rotary positions")
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.key_value_heads}")
        return self

    def check_parallel(self, parallel: ParallelSpec) -> list[tuple[str, str, Any, str]]:
        """Reasons why this model cannot be cut this way, as (path, message, got, expected)."""
        problems: list[tuple[str, str, Any, str]] = []
        if parallel.pp > self.layers:
            problems.append(
                (
                    "parallel.pp",
                    f"a transformer with {self.layers} layers has {self.layers} places for a stage",
                    parallel.pp,
                    f"at most {self.layers}",
                )
            )
        sizes = {
            "heads": self.heads,
            "kv_heads": self.key_value_heads,
            "ffn_dim": self.feed_forward_dim,
            "vocab_size": self.vocab_size,
        }
        for name, size in sizes.items():
            if size % parallel.tp:
                problems.append(
                    (
                        f"model.{name}",
                        f"{size} does not divide by tp={parallel.tp}",
                        size,
                        f"a multiple of {parallel.tp}",
                    )
                )
        return problems


class FromJob(Strict):
    """The model that a training job produced."""

    job: JobId
    step: Literal["latest"] | Annotated[int, Field(ge=0)] = "latest"


FamilyConfig = Annotated[MlpConfig | TransformerConfig, Field(discriminator="family")]
BUILDERS = {"mlp": "service.models.mlp:build", "transformer": "service.models.transformer:build"}


def _reference_form(value: Any) -> str | None:
    keys = value if isinstance(value, dict) else getattr(value, "model_fields_set", ())
    if "job" in keys or isinstance(value, FromJob):
        return "job"
    if "family" in keys or isinstance(value, MlpConfig | TransformerConfig):
        return "family"
    return None


ModelRef = Annotated[
    Annotated[FamilyConfig, Tag("family")] | Annotated[FromJob, Tag("job")],
    Discriminator(
        _reference_form,
        custom_error_type="model_reference",
        custom_error_message="a model is {family: mlp|transformer, …} or {job: ID}",
    ),
]
