"""Data in uploaded files: token rows and arrays, read where they lie."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import save_file
from training_runs import TRANSFORMER, train, upload

from service.jobs.files import DataLayout
from service.jobs.spec.data import FileArrays, FileTokens, TokensData
from service.models import data
from service.models.data import order, packed

NO_FILE = "file_" + "0" * 64


def upload_arrays(folder: Path, arrays: Mapping[str, np.ndarray[Any, Any]], form: str = "safetensors") -> str:
    path = folder / f"arrays.{form}"
    if form == "npz":
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    else:
        save_file(dict(arrays), path)
    return upload(folder, path.read_bytes())


def token_row(length: int, vocabulary: int = 50) -> np.ndarray[Any, Any]:
    return np.random.default_rng(length).integers(0, vocabulary, length)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(30, 400), sequence=st.integers(1, 9), encoding=st.sampled_from(["uint8", "uint16", "uint32"]))
def test_every_token_of_a_row_is_in_its_place(
    tmp_path_factory: pytest.TempPathFactory, length: int, sequence: int, encoding: str
) -> None:
    folder, row = tmp_path_factory.mktemp("row"), token_row(length)
    spec = FileTokens(
        file=upload(folder, row.astype(encoding).tobytes()), encoding=encoding, sequence=sequence, vocabulary=50
    )
    loaded = data.load(spec, DataLayout(folder))
    samples = (length - 1) // sequence
    assert len(loaded.train) + len(loaded.test) == samples
    assert len(loaded.test) == max(int(samples * 0.1), 1)
    splits = [split.take(torch.arange(len(split))) for split in (loaded.train, loaded.test)]
    inputs, targets = (torch.cat([getattr(each, name) for each in splits]) for name in ("inputs", "targets"))
    expected = torch.from_numpy(row[: samples * sequence + 1])
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs.flatten(), expected[:-1])
    assert torch.equal(targets.flatten(), expected[1:])


def test_numpys_own_format_and_a_test_file(tmp_path: Path) -> None:
    files = []
    for length in (100, 41):
        np.save(tmp_path / "row.npy", token_row(length).astype(np.int32))
        files.append(upload(tmp_path, (tmp_path / "row.npy").read_bytes()))
    spec = FileTokens(file=files[0], test_file=files[1], encoding="npy", sequence=10, vocabulary=50)
    loaded = data.load(spec, DataLayout(tmp_path))
    assert (len(loaded.train), len(loaded.test)) == (9, 4)
    assert loaded.test.take(torch.tensor([3])).targets[0].tolist() == token_row(41)[31:].tolist()


def claim(shape: tuple[int, ...]) -> bytes:
    """An array in NumPy's format of which there is only the header."""
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return content.getvalue()


def headed(header: str) -> bytes:
    """A file in NumPy's format with this header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


@pytest.mark.parametrize(
    ("content", "change", "message"),
    [
        (b"\x01\x00" * 5, {}, "data.file holds 5 tokens; data.sequence=8 needs at least 9"),
        (b"\x01\x00" * 9, {}, "data.file holds 1 sequences of 8: too few for a test split"),
        (b"\x01\x00" * 50 + b"\x00", {}, "data.file has 101 bytes, which are no whole number of uint16 ids"),
        (b"\x01\x00" * 40 + b"\x32\x00", {}, r"data.file holds the token id 50; data.vocabulary=50 allows 0 to 49"),
        (b"", {}, "data.file holds 0 tokens; data.sequence=8 needs at least 9"),
        (b"anything else", {"encoding": "npy"}, "data.file is no array in NumPy's format"),
        (b"", {"encoding": "npy"}, "data.file is no array in NumPy's format"),
        (b"PK\x03\x04 and no more", {"encoding": "npy"}, "data.file is no array in NumPy's format"),
        (claim((10**10,)), {"encoding": "npy"}, r"data.file .* claims shape \(10000000000,\) .* do not hold"),
        (claim((-5,)), {"encoding": "npy"}, r"data.file .* claims shape \(-5,\)"),
        (claim((10**30,)), {"encoding": "npy"}, r"data.file .* do not hold"),
        (
            claim((25,)),
            {"encoding": "npy"},
            r"data.file .* claims shape \(25,\) of float32, which the 0 bytes",
        ),
        (headed("{'descr': (), 'fortran_order': False, 'shape': (3,)}"), {"encoding": "npy"}, "data.file is no array"),
        (headed("if x:\n    a\n  b\n"), {"encoding": "npy"}, "data.file is no array"),
        (headed("-" * 9000 + "1"), {"encoding": "npy"}, "data.file is no array .*: its header is nested too deeply"),
        (b"some text", {"encoding": "text", "tokenizer": NO_FILE}, "data.tokenizer: there is no uploaded file file_0"),
        (b"\x01\x00" * 50, {"test_file": NO_FILE}, "data.test_file: there is no uploaded file file_0"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_by_field(
    tmp_path: Path, content: bytes, change: dict[str, Any], message: str
) -> None:
    spec = FileTokens.model_validate({"file": upload(tmp_path, content), "sequence": 8, "vocabulary": 50, **change})
    with pytest.raises(ValueError, match=message):
        data.load(spec, DataLayout(tmp_path))


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "row.npy", np.array([{}], dtype=object), allow_pickle=True)
    file = upload(tmp_path, (tmp_path / "row.npy").read_bytes())
    spec = FileTokens(file=file, encoding="npy", sequence=1, vocabulary=9)
    with pytest.raises(ValueError, match=r"data.file holds object of shape"):
        data.load(spec, DataLayout(tmp_path))


def test_of_a_large_row_windows_are_checked_and_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHECKED_WHOLE", 100), ("WINDOWS", 10), ("WINDOW", 4)):
        monkeypatch.setattr(packed, name, value)
    row = token_row(1000).astype(np.uint16)
    row[755] = 60  # between two windows, behind the first samples
    layout = DataLayout(tmp_path)
    spec = FileTokens(file=upload(tmp_path, row.tobytes()), sequence=10, vocabulary=50)
    loaded = data.load(spec, layout)
    with pytest.raises(ValueError, match="the token id 60"):
        loaded.train.take(torch.tensor([75]))
    row[102] = 60
    with pytest.raises(ValueError, match="the token id 60"):
        data.load(spec.model_copy(update={"file": upload(tmp_path, row.tobytes())}), layout)


def images(count: int = 20, kind: str = "uint8") -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return {
        "inputs": random.integers(0, 256, (count, 2, 3)).astype(kind),
        "targets": random.integers(0, 4, count).astype(np.uint8),
    }


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_arrays_are_flat_and_pixels_lie_between_0_and_1(tmp_path: Path, form: str) -> None:
    spec = FileArrays(file=upload_arrays(tmp_path, images(), form), shape=(2, 3), classes=4)
    loaded = data.load(spec, DataLayout(tmp_path))
    assert (len(loaded.train), len(loaded.test)) == (16, 4)
    batch = loaded.test.take(torch.tensor([3, 0]))
    assert batch.inputs.dtype == torch.float32
    assert torch.equal(batch.inputs, torch.from_numpy(images()["inputs"])[[19, 16]].flatten(1) / 255)
    assert batch.targets.tolist() == images()["targets"][[19, 16]].tolist()


@pytest.mark.parametrize("order", ["<", ">"])
def test_npz_files_hold_numbers_in_any_order_of_bytes(tmp_path: Path, order: str) -> None:
    own = images(10, "float32")
    arrays = {name: array.astype(array.dtype.newbyteorder(order)) for name, array in own.items()}
    spec = FileArrays(file=upload_arrays(tmp_path, arrays, "npz"), shape=(2, 3), classes=4)
    batch = data.load(spec, DataLayout(tmp_path)).train.take(torch.arange(8))
    assert torch.equal(batch.inputs, torch.from_numpy(own["inputs"])[:8].flatten(1))
    assert batch.targets.tolist() == own["targets"][:8].tolist()


def test_floats_are_taken_as_they_are_and_the_test_split_may_be_in_the_file(tmp_path: Path) -> None:
    own = images(6, "float64")
    arrays = {**images(10, "float64"), "test_inputs": own["inputs"] + 0.5, "test_targets": own["targets"]}
    loaded = data.load(FileArrays(file=upload_arrays(tmp_path, arrays), shape=(2, 3), classes=4), DataLayout(tmp_path))
    assert (len(loaded.train), len(loaded.test)) == (10, 6)
    assert torch.equal(
        loaded.test.take(torch.arange(6)).inputs, torch.from_numpy(own["inputs"] + 0.5).flatten(1).float()
    )


@pytest.mark.parametrize("form", [(6,), (2, 3), (1, 2, 3), (2, 3, 1)])
def test_samples_have_their_axes_in_the_order_that_the_spec_says(tmp_path: Path, form: tuple[int, ...]) -> None:
    own = images(10)
    arrays = {**own, "inputs": own["inputs"].reshape(10, *form)}
    spec = FileArrays(file=upload_arrays(tmp_path, arrays), shape=(2, 3), axes=(1, 0), classes=4)
    batch = data.load(spec, DataLayout(tmp_path)).train.take(torch.arange(8))
    assert torch.equal(batch.inputs, torch.from_numpy(own["inputs"])[:8].transpose(1, 2).flatten(1) / 255)
    with pytest.raises(ValidationError, match=r"shape=\[2, 3\] has 2 axes"):
        FileArrays(file=NO_FILE, shape=(2, 3), axes=(0, 0), classes=4)


@pytest.mark.parametrize(("kind", "value"), [("float32", np.nan), ("float32", np.inf), ("float64", 1e300)])
def test_numbers_that_are_not_finite_are_refused_with_their_sample(tmp_path: Path, kind: str, value: float) -> None:
    arrays = images(10, kind)
    arrays["inputs"][7, 1, 1] = value
    spec = FileArrays(file=upload_arrays(tmp_path, arrays), shape=(2, 3), classes=4)
    train_split = data.load(spec, DataLayout(tmp_path)).train
    assert len(train_split.take(torch.tensor([6, 5]))) == 2
    with pytest.raises(ValueError, match=r"data.source='file' gives inputs that are not finite: (nan|inf) in sample 7"):
        train_split.take(torch.tensor([6, 7]))


def test_the_test_split_may_be_another_file(tmp_path: Path) -> None:
    files = [upload_arrays(tmp_path, images(count)) for count in (10, 7)]
    spec = FileArrays(file=files[0], test_file=files[1], shape=(2, 3), classes=4)
    loaded = data.load(spec, DataLayout(tmp_path))
    assert (len(loaded.train), len(loaded.test)) == (10, 7)


def test_of_two_test_splits_none_is_dropped(tmp_path: Path) -> None:
    both = {**images(), "test_inputs": images()["inputs"], "test_targets": images()["targets"]}
    files = [upload_arrays(tmp_path, each) for each in (both, images(7))]
    spec = FileArrays(file=files[0], test_file=files[1], shape=(2, 3), classes=4)
    with pytest.raises(ValueError, match=r"data.test_file: data.file has a test split of its own \(test_inputs\)"):
        data.load(spec, DataLayout(tmp_path))


def test_complex_labels_are_no_whole_numbers(tmp_path: Path) -> None:
    file = upload_arrays(tmp_path, {**images(), "targets": np.zeros(20, np.complex64)}, "npz")
    with pytest.raises(ValueError, match=r"targets is torch.complex64 .* one whole number for each"):
        data.load(FileArrays(file=file, shape=(2, 3), classes=4), DataLayout(tmp_path))


@pytest.mark.parametrize("form", ["safetensors", "npz"])
@pytest.mark.parametrize(
    ("change", "spec", "message"),
    [
        ({"targets": None}, {}, "data.file has no array 'targets', but inputs"),
        ({}, {"shape": (3, 3)}, r"inputs have shape \(20, 2, 3\); data.shape says \(n, 3, 3\)"),
        ({}, {"classes": 3}, "targets are 0 to 3; data.classes=3 allows 0 to 2"),
        ({"targets": np.zeros(19, np.int64)}, {}, r"targets is torch.int64 of shape \(19,\); .* each of 20 inputs"),
        ({"targets": np.zeros(20)}, {}, "targets is torch.float64 .* one whole number for each"),
        ({"inputs": np.zeros(20)}, {"shape": (1,)}, r"inputs have shape \(20,\); data.shape says \(n, 1,\)"),
        ({"inputs": np.zeros((20, 2, 3), bool)}, {}, "inputs are torch.bool; expected real numbers"),
        ({"inputs": np.zeros((20, 3, 2))}, {}, r"inputs have shape \(20, 3, 2\); data.shape says \(n, 2, 3\)"),
        ({}, {"shape": (6,)}, r"inputs have shape \(20, 2, 3\); data.shape says \(n, 6,\)"),
        ({"test_targets": np.zeros(3, np.int64)}, {}, "data.file has no array 'test_inputs'"),
        ({"test_input": np.zeros((3, 2, 3))}, {}, "has an array 'test_input'; expected test_inputs and test_targets"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_field(
    tmp_path: Path, form: str, change: dict[str, Any], spec: dict[str, Any], message: str
) -> None:
    arrays = {name: array for name, array in {**images(), **change}.items() if array is not None}
    fields = {"file": upload_arrays(tmp_path, arrays, form), "shape": (2, 3), "classes": 4, **spec}
    with pytest.raises(ValueError, match=message):
        data.load(FileArrays.model_validate(fields), DataLayout(tmp_path))


def test_arrays_of_objects_and_other_files_are_refused(tmp_path: Path) -> None:
    objects = {"inputs": np.array([{}] * 3, dtype=object), "targets": np.zeros(3, np.int64)}
    for file in (upload_arrays(tmp_path, objects, "npz"), upload(tmp_path, b"PK\x03\x04 and no more")):
        with pytest.raises(ValueError, match=r"data.file is no npz file of numbers"):
            data.load(FileArrays(file=file, shape=(1,), classes=2), DataLayout(tmp_path))
    with pytest.raises(ValueError, match=r"data.file is neither safetensors nor npz"):
        data.load(FileArrays(file=upload(tmp_path, b"x" * 99), shape=(1,), classes=2), DataLayout(tmp_path))


def test_an_array_that_claims_more_than_its_member_holds_is_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as opened:
        opened.writestr("inputs.npy", claim((10**10, 4)))
    spec = FileArrays(file=upload(tmp_path, content.getvalue()), shape=(4,), classes=2)
    with pytest.raises(ValueError, match=r"data.file is no npz .* inputs.npy: .* claims shape \(10000000000, 4\)"):
        data.load(spec, DataLayout(tmp_path))


def test_a_feed_reads_what_the_order_says_in_any_order_of_steps(tmp_path: Path) -> None:
    spec = FileTokens(file=upload(tmp_path, token_row(500).astype(np.uint16).tobytes()), sequence=5, vocabulary=50)
    samples = data.load(spec, DataLayout(tmp_path)).train
    batches = data.BatchOrder(3, len(samples), 8)
    fed = data.open_feed(samples, batches, 1, 2, torch.device("cpu"))
    assert isinstance(fed, order.StreamFeed)
    for step in (0, 1, 2, 7, 8, 1):
        assert torch.equal(fed.batch(step).inputs, samples.take(batches.share(step, 1, 2)).inputs)


def test_a_file_of_the_built_in_corpus_trains_like_the_built_in_source(tmp_path: Path) -> None:
    whole = data.load(TokensData(sequence=32))
    row = torch.cat([whole.train.take(torch.arange(len(whole.train))).inputs.flatten(), torch.tensor([0])])
    spec = FileTokens(
        file=upload(tmp_path, row.to(torch.uint8).numpy().tobytes()),
        test_file=upload(tmp_path, row[:1000].to(torch.uint8).numpy().tobytes()),
        encoding="uint8",
        sequence=32,
        vocabulary=256,
    )
    built_in = train(tmp_path / "built-in", {**TRANSFORMER, "steps": 2}, test_samples=8)
    from_file = train(tmp_path, {**TRANSFORMER, "data": spec.model_dump(), "steps": 2}, test_samples=8)
    assert from_file["loss"] == built_in["loss"]
