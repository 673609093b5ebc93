"""Reads the header of a family's uploaded weights, and maps the names that a wrapper or another module gave them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from service.formats.archive import (
    ArchiveError,
    TensorHeaderError,
    TensorTypeError,
    is_archive,
    read_shapes,
    shapes_in,
    unwrapped,
)
from service.jobs.spec.families import MlpConfig
from service.jobs.spec.families.packaged import PackagedConfig
from service.jobs.spec.model import ModelConfig

_NUMBERED = re.compile(r"(.*?)(\d+)\.(weight|bias)")
PACKAGED = "blocks.0.network."
"""The beginning of a package's names of tensors in a model of ours."""
_ADVICE = "safetensors.torch.save_file(model.state_dict(), PATH) writes one"


class WeightsFileError(ValueError):
    """The file holds no weights for the model."""


def shapes_of(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file by name, from its header. Raises :class:`WeightsFileError`."""
    try:
        with path.open("rb") as content:
            return shapes_in(content, path.stat().st_size)
    except TensorTypeError as error:
        raise WeightsFileError(f"it {error}") from error
    except TensorHeaderError as error:
        raise WeightsFileError(f"it {error}; {_ADVICE}") from error


def names_of(config: ModelConfig, held: Collection[str]) -> Mapping[str, str]:
    """Return the file's names of its tensors, by the model's names: wrappers' prefixes are ignored, a package's names
    are those of its module, and tensors of a plain ``nn.Sequential`` are matched by the order of its layers.

    Raises :class:`WeightsFileError` if two become one.
    """
    bare: dict[str, str] = {}
    for name in held:
        if (other := bare.setdefault(unwrapped(name), name)) != name:
            raise WeightsFileError(f"it has {unwrapped(name)!r} twice, as {other!r} and {name!r}; leave one out")
    if isinstance(config, PackagedConfig):
        return {PACKAGED + name.removeprefix(PACKAGED): held for name, held in bare.items()}
    if isinstance(config, MlpConfig) and "head.weight" not in bare:
        return _sequential(len(config.hidden), bare)
    return bare


def in_archive(path: Path, config: ModelConfig) -> bool:
    """Return whether a package's weights are in an archive, beside a ``config.json``, as its checkpoints are."""
    return isinstance(config, PackagedConfig) and is_archive(path)


def check_weights(path: Path, config: ModelConfig) -> None:
    """Raise :class:`WeightsFileError` if a file cannot hold the weights of a model, as far as its header tells."""
    if in_archive(path, config):
        try:
            names_of(config, read_shapes(path))
        except ArchiveError as error:
            raise WeightsFileError(str(error)) from error
        return
    shapes = shapes_of(path)
    names = names_of(config, shapes)
    if not isinstance(config, MlpConfig):
        return
    widths = (config.in_features, *config.hidden, config.out_features)
    layers = [*(f"blocks.{index}.linear" for index in range(len(config.hidden))), "head"]
    check_foreign(names, [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")])
    for layer, before, after in zip(layers, widths, widths[1:], strict=False):
        for name, wanted in ((f"{layer}.weight", (after, before)), (f"{layer}.bias", (after,))):
            if name not in names:
                shown = ", ".join(list(shapes)[:6]) + (", …" if len(shapes) > 6 else "")
                raise WeightsFileError(
                    f"it has no weights for {name!r}, nor layers of that number in order; it has {shown}"
                )
            if shapes[names[name]] != wanted:
                raise WeightsFileError(
                    f"{names[name]!r} has shape {shapes[names[name]]}; {name!r} of this model has {wanted}"
                )


def check_foreign(names: Mapping[str, str], own: Collection[str]) -> None:
    """Raise :class:`WeightsFileError` for a tensor that is none of the model's ``own``, if all of those are there."""
    foreign = sorted(names[name] for name in names if name not in own)
    if foreign and all(name in names for name in own):
        raise WeightsFileError(f"it has {foreign[0]!r}, which a model of this configuration has not; leave it out")


def _sequential(hidden: int, bare: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names of linear layers that are numbered in one list, as ``0.weight`` or ``net.0.weight``."""
    matched = {name: found for name in bare if (found := _NUMBERED.fullmatch(name))}
    numbers = sorted({int(found[2]) for found in matched.values()})
    if len(matched) < len(bare) or len({found[1] for found in matched.values()}) != 1 or len(numbers) != hidden + 1:
        return bare
    own = [*(f"blocks.{index}.linear" for index in range(hidden)), "head"]
    layers = dict(zip(numbers, own, strict=True))
    return {f"{layers[int(found[2])]}.{found[3]}": bare[name] for name, found in matched.items()}
