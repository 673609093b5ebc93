"""Reads the headers of uploaded weights, in a file or in a checkpoint's archive, of which no other members count, and
maps the names that a wrapper or another module gave them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from service.formats.archive import OF_PICKLE, OF_ZIP, ArchiveError, ArchiveMember, is_archive, opened
from service.jobs.spec.families import MlpConfig
from service.jobs.spec.families.packaged import PackagedConfig
from service.jobs.spec.model import ModelConfig

_NUMBERED = re.compile(r"(.*?)(\d+)\.(weight|bias)")
PACKAGED = "blocks.0.network."
"""The beginning of a package's names of tensors in a model of ours."""
_ADVICE = "safetensors.torch.save_file(model.state_dict(), PATH) writes one"
_WRAPPERS = ("module.", "_orig_mod.")
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
LARGEST_CONFIG = 2**20
"""The most bytes of a configuration."""
LARGEST = 2**25
"""The most bytes of a header."""
_ABOUT = "__metadata__"
_OF_TORCH = (OF_ZIP, OF_PICKLE)
"""The first bytes of a file of ``torch.save``: a zip file, or a pickle."""
_COUNT = ((), "I64")
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


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


class TensorHeaderError(ValueError):
    """The file is no safetensors file; the message is the end of a sentence about it."""


class TensorTypeError(TensorHeaderError):
    """A tensor is of a type that weights do not have."""


def shapes_in(content: IO[bytes], size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a file by name. ``content`` is at its beginning, ``size`` is in bytes.

    Raises :class:`TensorHeaderError`, also for tensors that are neither floating-point numbers nor a count, as of the
    batches in a running statistic.
    """
    held = tensors_in(content, size)
    for name, (shape, kind) in held.items():
        if kind not in FLOATS and (shape, kind) != _COUNT:
            raise TensorTypeError(f"has {name!r} of the type {kind}; expected one of {', '.join(FLOATS)}")
    return {name: shape for name, (shape, _) in held.items()}


def tensors_in(content: IO[bytes], size: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and type, as the format names it, of each tensor in a file. Raises :class:`TensorHeaderError`."""
    head = content.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(LARGEST, size - 8):
        if head.startswith(_OF_TORCH):
            raise TensorHeaderError("is a file of torch.save (.pt, .pt2), not of safetensors")
        raise TensorHeaderError(f"is no safetensors file: its header would have {length} bytes")
    try:
        header = json.loads(content.read(length))
        return {
            name: (tuple(map(int, each["shape"])), str(each["dtype"]))
            for name, each in header.items()
            if name != _ABOUT
        }
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TensorHeaderError(f"is no safetensors file: {error!r}") from error


def read_text(archive: Path, name: str) -> bytes:
    """Return the content of ``config.json``, or of another small member. Raises :class:`ArchiveError`."""
    with _checkpoint(archive) as members:
        if name not in members:
            raise ArchiveError(f"the archive has no {name} beside {', '.join(sorted(members))}")
        return _read(members[name])


def weight_files(names: Collection[str], index: Callable[[], bytes]) -> dict[str, frozenset[str]]:
    """Return the files of a checkpoint that hold its weights: those that its index names, else ``model.safetensors``,
    else all; each with the names of the tensors that the index places in another file, of which it may hold a stale
    copy. Raises :class:`ArchiveError` for an index that names other files.
    """
    if INDEX not in names:
        every = sorted(name for name in names if name.endswith(".safetensors"))
        return dict.fromkeys([SINGLE] if SINGLE in names else every, frozenset())
    try:
        # Names come from the archive: only files beside the index count.
        placed = {tensor: PurePosixPath(str(name)).name for tensor, name in json.loads(index())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(f"{INDEX} has no weight_map of names: {error!r}") from error
    shards = sorted(set(placed.values()))
    if missing := [name for name in shards if name not in names]:
        raise ArchiveError(f"{INDEX} names {missing[0]}, which the archive does not have")
    return {shard: frozenset(tensor for tensor, name in placed.items() if name != shard) for shard in shards}


def unwrapped(name: str) -> str:
    """Return the name of a tensor without the prefixes of wrappers: DistributedDataParallel's at the front,
    those of compiled modules in their place.
    """
    while name.startswith(_WRAPPERS):
        name = name.removeprefix(_WRAPPERS[0]).removeprefix(_WRAPPERS[1])
    return name.replace(f".{_WRAPPERS[1]}", ".")


def read_shapes(archive: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by their :func:`unwrapped` names, from the headers of the files that hold the
    weights. Raises :class:`ArchiveError`.
    """
    found: dict[str, tuple[int, ...]] = {}
    with _checkpoint(archive) as members:
        files = weight_files(members, lambda: _read(members[INDEX]))
        if not files:
            raise ArchiveError(f"the archive has no .safetensors file beside {CONFIG}")
        for name, elsewhere in files.items():
            held = {tensor: shape for tensor, shape in _shapes(members[name]).items() if tensor not in elsewhere}
            shapes = {unwrapped(each): shape for each, shape in held.items()}
            if len(shapes) < len(held):
                raise ArchiveError(f"{name} has a tensor twice, with and without a prefix of {' or '.join(_WRAPPERS)}")
            if doubled := found.keys() & shapes.keys():
                raise ArchiveError(f"{min(doubled)} is in several files, and no {INDEX} says which one counts")
            found |= shapes
    return found


def _shapes(member: ArchiveMember) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file from its header. Raises :class:`ArchiveError`."""
    try:
        with member.open() as content:
            return shapes_in(content, member.size)
    except TensorHeaderError as error:
        raise ArchiveError(f"{member.name} {error}") from error


def unpack(archive: Path, folder: Path) -> None:
    """Put configuration, index and safetensors files into the new ``folder``. Raises :class:`ArchiveError`."""
    with _checkpoint(archive) as members:
        if not any(name.endswith(".safetensors") for name in members):
            raise ArchiveError(f"the archive has no .safetensors file beside {CONFIG}")
        folder.mkdir()
        for name, member in members.items():
            with member.open() as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, 2**20)


@contextmanager
def _checkpoint(archive: Path) -> Iterator[dict[str, ArchiveMember]]:
    """Return the members that count by name: those beside the ``config.json`` that is nearest to the top."""
    with opened(archive, f"{CONFIG} and safetensors files") as members:
        configs = [member for member in members if member.name == CONFIG]
        if not configs:
            raise ArchiveError(f"the archive has no {CONFIG}")
        home = min(configs, key=lambda member: len(member.path.parts)).path.parent
        yield {member.name: member for member in members if member.path.parent == home and _counts(member.name)}


def _counts(name: str) -> bool:
    return name in (CONFIG, INDEX) or name.endswith(".safetensors")


def _read(member: ArchiveMember) -> bytes:
    if member.size > LARGEST_CONFIG:
        raise ArchiveError(f"{member.name} has {member.size} bytes; at most {LARGEST_CONFIG} are expected")
    with member.open() as content:
        return content.read(LARGEST_CONFIG)


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


def check_weights(path: Path, config: ModelConfig) -> None:
    """Raise :class:`WeightsFileError` if a file cannot hold the weights of a model, as far as its header tells."""
    if isinstance(config, PackagedConfig) and is_archive(path):  # beside a config.json, as its checkpoints are
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
