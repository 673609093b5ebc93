"""What specs may say of the network and of the loop; without torch, since the API reads it too."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trivet.plugins import Features, ModelConfig, ModelFamily, ProgramConfig, ProgramKind


class DigitsResnet(ModelConfig):
    """A small residual network for pictures of 8 × 8."""

    family: Literal["digits-resnet"] = "digits-resnet"
    width: int = Field(16, ge=1)

    @property
    def reads(self) -> Features:
        return Features(64, 10)


class DigitsLoop(ProgramConfig):
    """The script's own loop over its own data."""

    name: Literal["digits-loop"] = "digits-loop"
    width: int = Field(16, ge=1)
    batch: int = Field(64, ge=1)
    lr: float = Field(0.02, gt=0)


FAMILY = ModelFamily(DigitsResnet, "digits_resnet.network:build")
PROGRAM = ProgramKind(DigitsLoop, "digits_resnet.loop:DigitsProgram")
