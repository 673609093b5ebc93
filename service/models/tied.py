"""Parameters that a model uses in two places, such as one table for embedding and head (Press & Wolf, 2017).

A family's module says so by ``tied``: for each second place the name of the first. A model in one piece has one
parameter for both. Of a pipeline the first stage has one and the last a copy, which starts from the same numbers and
stays equal, since both get the sum of both gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from service.parallel.tensor.placement import unpadded_rows


def tied_names(module: nn.Module) -> Mapping[str, str]:
    """Return, for each second place of a tied parameter, the name of the first, which names the parameter."""
    names: Mapping[str, str] = getattr(module, "tied", {})
    return names


def global_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, under its name in every layout: that of its first place."""
    names = tied_names(module)
    for name, parameter in module.named_parameters():
        yield names.get(name, name), parameter


def global_rows(module: nn.Module) -> dict[str, int]:
    """Return, by the same names, the rows without padding of each padded parameter."""
    names = tied_names(module)
    return {names.get(name, name): rows for name, rows in unpadded_rows(module).items()}


def tie(module: nn.Module) -> None:
    """Let both places share one parameter, if the module has both."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for second, first in tied_names(module).items():
        if first in parameters and second in parameters:
            owner, _, leaf = second.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameters[first])
