"""Files that users bring, mutated: each is read or refused in words, within limits of memory and processor time."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzzed_readers
import numpy as np
import pytest
import torch
from archives import zipped
from pydantic import TypeAdapter

from service.jobs.files import DataLayout
from service.jobs.spec.model import ModelRef
from service.models import reference
from service.models.data import arrays
from service.models.full_weights import WeightsError

MUTATIONS = 700
CONFIG = {"family": "transformer", "vocab_size": 8, "dim": 8, "layers": 1, "heads": 2}
MODEL: TypeAdapter[Any] = TypeAdapter(ModelRef)


@pytest.mark.slow
def test_mutated_files_are_read_or_refused_in_words(tmp_path: Path) -> None:
    """By one process, which imports once. The seed of one that is neither is named, and gives the same file again."""
    command = [sys.executable, fuzzed_readers.__file__, "0", str(MUTATIONS), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stderr
    counts = json.loads(ended.stdout)
    assert counts.keys() == fuzzed_readers.READERS.keys()
    for name, (read, refused) in counts.items():
        assert min(read, refused) > 0, name
        assert read + refused == MUTATIONS, f"{name}: some were refused without a word"


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def safetensors(head: dict[str, Any], content: bytes) -> bytes:
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + content


def entry(start: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def torch_zip() -> bytes:
    made = io.BytesIO()
    torch.save({"w": torch.zeros(2), "evil": Evil()}, made)
    return made.getvalue()


def bomb() -> bytes:
    """Headers of arrays of 64 MiB, and nothing behind them."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 24,)})
    return zipped({f"a{n}.npy": header.getvalue() for n in range(3)})


def objects() -> bytes:
    made = io.BytesIO()
    np.savez(made, inputs=np.array([Evil()], dtype=object))
    return made.getvalue()


HOSTILE = {
    "overlapping offsets": safetensors({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, bytes(24)),
    "offsets beyond the file": safetensors({"a": entry(0, 1 << 40, [1 << 38])}, bytes(16)),
    "offsets that turn around": safetensors({"a": entry(16, 0, [4])}, bytes(16)),
    "a shape that overflows": safetensors({"a": entry(0, 16, [1 << 62, 1 << 62])}, bytes(16)),
    "a header of all memory": struct.pack("<Q", 1 << 62) + b"{}",
    "a pickle": pickle.dumps(Evil()),
    "a zip of torch": torch_zip(),
    "objects in an npz": objects(),
    "a header that claims more than there is": bomb(),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_weights_and_arrays_are_refused_and_never_unpickled(
    content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = f"file_{'0' * 64}"
    layout = DataLayout(tmp_path)
    path = layout.file(file)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^data\.file "):
        arrays.read(path, "data.file")
    with pytest.raises(WeightsError, match=r"^model\.safetensors: "):
        reference.resolve(MODEL.validate_python({"safetensors": file, **CONFIG}), layout)
    assert "unpickled" not in capfd.readouterr().out
