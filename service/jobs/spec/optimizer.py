"""Defines the optimizers of training: the built-in ones, and those of installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from service.jobs.plugins import OptimizerConfig, OptimizerKind, Pattern, Strict, disagreement
from service.jobs.plugins.catalogue import catalogue

_Share = Annotated[float, Field(ge=0, lt=1)]


class _AdamFields(Strict):
    """The numbers of AdamW beside rate and decay."""

    betas: tuple[_Share, _Share] = Field(
        (0.9, 0.95), description="decay rates of the mean gradient and of the mean square"
    )
    eps: float = Field(1e-8, gt=0, description="the number that keeps the division by the root mean square finite")


class AdamWConfig(_AdamFields, OptimizerConfig):
    """AdamW (Loshchilov & Hutter, 2019), as ``torch.optim.AdamW`` computes it."""

    name: Literal["adamw"] = Field("adamw", description="Adam with decoupled weight decay")


class SgdConfig(OptimizerConfig):
    """Gradient descent with momentum, as ``torch.optim.SGD`` computes it without dampening."""

    name: Literal["sgd"] = Field("sgd", description="gradient descent, with momentum if it is given")
    momentum: _Share = Field(0.0, description="decay rate of the sum of gradients that is followed; 0 keeps no sum")
    nesterov: bool = Field(False, description="whether to look ahead by one step of the momentum (Nesterov, 1983)")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty: this times a parameter is added to its gradient")

    def keeps(self) -> dict[str, Any]:
        return super().keeps() | {"momentum": self.momentum > 0}

    @model_validator(mode="after")
    def _looks_ahead_along_a_momentum(self) -> SgdConfig:
        if self.nesterov and not self.momentum:
            raise disagreement("momentum", "nesterov=true looks ahead along the momentum", 0, "more than 0")
        return self


class LionConfig(OptimizerConfig):
    """Lion (Chen et al., 2023): the sign of a mix of gradient and momentum, times the rate."""

    name: Literal["lion"] = Field("lion", description="the sign of the momentum")
    lr: float = Field(1e-4, gt=0, description="the learning rate at its peak, three to ten times below AdamW's")
    betas: tuple[_Share, _Share] = Field(
        (0.9, 0.99), description="shares of the old momentum in an update, and in the new momentum"
    )


class AdamWOfOthers(_AdamFields):
    """AdamW, for the parameters that Muon leaves to it."""

    match: tuple[Pattern, ...] = Field(
        max_length=64,
        description="names of matrices that AdamW updates, as a rule those of embedding and head; [] for none",
    )
    lr: float = Field(1e-3, gt=0, description="its learning rate at the peak")
    weight_decay: float = Field(0.0, ge=0, description="its weight decay")


class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al., 2024) for matrices, as ``torch.optim.Muon`` computes it, and AdamW for all else.

    Muon updates every parameter of two dimensions that ``adamw.match`` does not name; AdamW updates the others. A
    divided matrix is gathered, and orthogonalised whole.
    """

    name: Literal["muon"] = Field("muon", description="orthogonalised momentum of matrices, AdamW for all else")
    momentum: _Share = Field(0.95, description="decay rate of the mean gradient")
    nesterov: bool = Field(True, description="whether to look ahead by one step of the momentum")
    iterations: int = Field(5, ge=1, lt=100, description="Newton-Schulz iterations, in bf16")
    adjust: Literal["original", "match_rms_adamw"] = Field(
        "original",
        description="the factor on lr by a matrix's shape, (rows, columns): original: √max(1, rows/columns); "
        "match_rms_adamw: 0.2·√max(rows, columns), with which AdamW's lr and weight_decay fit",
    )
    adamw: AdamWOfOthers = Field(description="what AdamW updates, and how")

    def patterns(self) -> dict[str, tuple[str, ...]]:
        return super().patterns() | {"adamw.match": self.adamw.match}

    def keeps(self) -> dict[str, Any]:
        return super().keeps() | {"adamw.match": self.adamw.match}


OPTIMIZERS = catalogue(
    OptimizerKind,
    (
        OptimizerKind(AdamWConfig, "service.training.optimizers.adamw:adamw"),
        OptimizerKind(SgdConfig, "service.training.optimizers.sgd:sgd"),
        OptimizerKind(LionConfig, "service.training.optimizers.lion:lion"),
        OptimizerKind(MuonConfig, "service.training.optimizers.muon:muon"),
    ),
    default="adamw",
)

if TYPE_CHECKING:
    OptimizerSpec = OptimizerConfig
else:
    OptimizerSpec = OPTIMIZERS.choice(BeforeValidator(OPTIMIZERS.read_name))
