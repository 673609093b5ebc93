"""Real torchrun groups on gloo."""

from launching import torchrun

__all__ = ["torchrun"]
