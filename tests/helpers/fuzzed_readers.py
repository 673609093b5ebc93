"""What reads files that users bring, for a fuzzer; and a process of its own for it, with limits of memory and time.

``python fuzzed_readers.py FIRST LAST FOLDER [READER...]`` reads the mutations of these seeds, by each reader if none is
named. It prints for each how many were read and how many refused, and fails with the first seed that was neither.
"""

from __future__ import annotations

import io
import json
import random
import resource
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_GIB = 2
CPU_S = 240
INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
WORDS = (b"-1", b"0", b"1e999", b"nan", b"99999999999999999999", b"[", b"]", b"{", b"}", b"(", b")", b"\0", b"&a *a")


def mutated(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """One or two changes: bits, numbers of every width, words, and spans left out, doubled, exchanged or taken from
    another file.
    """
    changed = bytearray(content)
    for _ in range(draw.randint(1, 2)):
        place = draw.randrange(len(changed) + 1)
        end = min(len(changed), place + draw.choice([1, 2, 4, 8, 64]))
        match draw.randrange(7):
            case 0 if place < len(changed):
                changed[place] ^= 1 << draw.randrange(8)
            case 1:
                width = draw.choice([1, 2, 4, 8])
                number = draw.choice(INTERESTING) % (1 << 8 * width)
                changed[place : place + width] = number.to_bytes(width, draw.choice(["little", "big"]))
            case 2:
                changed[place:end] = draw.choice(WORDS)
            case 3:
                del changed[place:end]
            case 4:
                changed[place:place] = changed[place:end] * draw.choice([1, 2, 100])
            case 5:
                start = draw.randrange(len(other))
                changed[place:end] = other[start : start + (end - place)]
            case _:
                del changed[max(1, place) :]
    return bytes(changed) or b"\0"


def npz(path: Path) -> None:
    from service.formats.arrays import headers
    from service.models.data import arrays

    with suppress(ValueError):  # the API's check, which reads it before a rank does
        headers(path, "data.file")
    arrays.read(path, "data.file")


def tokens(path: Path) -> None:
    from service.jobs.spec.data import FileTokens
    from service.models.data import packed

    spec = FileTokens.model_validate(
        {"file": f"file_{'0' * 64}", "encoding": "npy", "sequence": 4, "vocabulary": 100, "format": "tokens"}
    )
    packed.open_tokens(path, "npy", spec, "data.file")


def weights(path: Path) -> None:
    from pydantic import TypeAdapter

    from service.jobs.files import DataLayout
    from service.jobs.spec.model import ModelRef
    from service.models import reference

    name = f"file_{'0' * 64}"
    layout = DataLayout(path.parent)
    placed = layout.file(name)
    placed.parent.mkdir(parents=True, exist_ok=True)
    placed.write_bytes(path.read_bytes())
    config = {"family": "transformer", "vocab_size": 8, "dim": 8, "layers": 1, "heads": 2}
    _, found = reference.resolve(TypeAdapter(ModelRef).validate_python({"safetensors": name, **config}), layout)
    assert found is not None
    for each in found.values():
        each[tuple(slice(None) for _ in each.shape)].double().sum().item()  # reads each page of what is mapped


def checked(path: Path) -> None:
    """An upload that a spec names, as the check before the job has it."""
    from service.jobs.kinds.registry import spec_adapter
    from service.jobs.plugins import CheckContext
    from service.jobs.submission.check import check

    named = f"file_{'1' * 64}"
    mlp = {"family": "mlp", "in_features": 2, "hidden": [4], "out_features": 1}
    model = {"onnx": named} if path.suffix == ".onnx" else mlp
    asked = {"box": {"lower": [0, 0], "upper": [1, 1], "output": [{"coefficients": [1], "threshold": 0}]}}
    question = asked if path.suffix == ".onnx" else {"vnnlib": named}
    spec = spec_adapter.validate_python({"kind": "verify", "model": model, "property": question})
    if check(spec, CheckContext(path_of=lambda _: path)):
        raise ValueError("refused")


def spec(path: Path) -> None:
    from trivet.cli import specs

    if path.suffix == ".json":
        specs.read_batch(str(path))
    else:
        specs.read(str(path))


def strict(path: Path) -> None:
    from api.requests import loads

    loads(path.read_bytes())


def _samples() -> dict[str, bytes]:
    import numpy as np
    from onnx import TensorProto, helper

    arrays = {"inputs": np.zeros((3, 2), np.float32), "targets": np.zeros(3, np.int64)}
    zipped, stored, row = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez_compressed(zipped, **arrays)  # type: ignore[arg-type]
    np.savez(stored, **arrays)  # type: ignore[arg-type]
    np.save(row, np.arange(50, dtype=np.uint16))
    head = {f"layers.{n}": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * n, 16 * n + 16]} for n in range(3)}
    text = json.dumps(head).encode()
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", size)) for name, size in (("x", 2), ("y", 1))]
    weight = helper.make_tensor("w", TensorProto.FLOAT, (2, 1), [1.0, 2.0])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [weight])
    names = "".join(f"(declare-const {name} Real)\n" for name in ("X_0", "X_1", "Y_0"))
    box = "".join(f"(assert (>= X_{n} 0))\n(assert (<= X_{n} 1.5e-1))\n" for n in (0, 1))
    train: dict[str, Any] = {"kind": "train", "name": "a", "model": {"family": "mlp", "hidden": [1, 2]}, "steps": 10}
    anchored = "base: &a {x: 1, y: [1, 2]}\nother: &b [*a, *a]\nmore: [*b, *b, *a]\nmerged:\n  <<: *a\n  x: 2.5\n"
    return {
        "npz": zipped.getvalue(),
        "stored.npz": stored.getvalue(),
        "npy": row.getvalue(),
        "safetensors": struct.pack("<Q", len(text)) + text + bytes(48),
        "onnx": helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString(),
        "vnnlib": (names + box + "(assert (or (and (<= Y_0 0)) (and (>= Y_0 1))))\n").encode(),
        "yaml": anchored.encode(),
        "json": json.dumps([train, {**train, "labels": {"a": "b"}}]).encode(),
    }


READERS: Mapping[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "arrays": (npz, ("npz", "stored.npz", "safetensors")),
    "tokens": (tokens, ("npy",)),
    "weights": (weights, ("safetensors",)),
    "models": (checked, ("onnx",)),
    "queries": (checked, ("vnnlib",)),
    "specs": (spec, ("yaml", "json")),
    "bodies": (strict, ("json",)),
}


def run(name: str, first: int, last: int, folder: Path) -> tuple[int, int]:
    """Return how many mutations were read, and how many refused in words; what is refused without any is in neither.
    Others raise.
    """
    from trivet.errors import TrivetError

    read, kinds = READERS[name]
    samples = _samples()
    done = refused = 0
    for seed in range(first, last):
        draw = random.Random(f"{name} {seed}")
        kind = draw.choice(kinds)
        path = folder / f"given.{kind}"
        path.write_bytes(mutated(samples[kind], draw.choice(list(samples.values())), draw))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(path)
            done += 1
        except (ValueError, TrivetError) as error:
            refused += bool(str(error))
        except BaseException:
            print(f"{name}, seed {seed}: neither read nor refused", file=sys.stderr)
            traceback.print_exc()
            raise SystemExit(1) from None
    return done, refused


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_GIB << 30, LIMIT_GIB << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    first, last, folder, *names = sys.argv[1:]
    print(json.dumps({name: run(name, int(first), int(last), Path(folder)) for name in names or READERS}))
