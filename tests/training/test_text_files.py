"""Texts in uploaded files: taken whole, tokenised once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Torchrun
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from training_runs import TRANSFORMER, train, upload

from service.jobs.files import DataLayout
from service.jobs.spec.data import FileTokens
from service.models import data
from service.models.data import files

NO_FILE = "file_" + "0" * 64


def upload_tokenizer(folder: Path) -> str:
    words = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return upload(folder, tokenizer.to_str().encode())


def test_a_text_is_tokenised_in_pieces_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", 10)
    file = upload(tmp_path, "the cat sat\non the cät\n\nthe cat".encode())
    spec = FileTokens(
        file=file, encoding="text", tokenizer=upload_tokenizer(tmp_path), sequence=1, vocabulary=4, test_fraction=0.5
    )
    layout = DataLayout(tmp_path)
    loaded = data.load(spec, layout)
    splits = (loaded.train, loaded.test)
    tokens = [split.take(torch.arange(len(split))).inputs.flatten().tolist() for split in splits]
    assert tokens == [[1, 2, 3, 0], [1, 0, 1]]
    monkeypatch.setattr(files, "_chunks", None)  # a second pass over the text would fail
    assert len(data.load(spec, layout).train) == 4
    assert [path.suffix for path in (layout.cache / "tokens").iterdir()] == [".uint16"]


def test_an_id_beyond_the_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "the": 70_000}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    file, own = upload(tmp_path, b"the cat"), upload(tmp_path, tokenizer.to_str().encode())
    spec = FileTokens(file=file, encoding="text", tokenizer=own, sequence=1, vocabulary=60_000)
    with pytest.raises(ValueError, match=r"data.tokenizer gives the token id 70000; data.vocabulary=60000 allows"):
        data.load(spec, DataLayout(tmp_path))


def test_a_text_is_taken_whole_whatever_the_tokenizer_says_of_sentences(tmp_path: Path) -> None:
    whole = Tokenizer.from_file(str(DataLayout(tmp_path).file(upload_tokenizer(tmp_path))))
    whole.enable_truncation(2)
    whole.enable_padding(length=7)
    tokenizer = upload(tmp_path, whole.to_str().encode())
    file = upload(tmp_path, b"the cat sat the")
    spec = FileTokens(file=file, encoding="text", tokenizer=tokenizer, sequence=1, vocabulary=4, test_fraction=0.3)
    train_split = data.load(spec, DataLayout(tmp_path)).train
    assert train_split.take(torch.arange(len(train_split))).targets.flatten().tolist() == [2, 3]


@pytest.mark.parametrize(
    ("content", "vocabulary", "message"),
    [
        (b"the cat sat", 3, "data.tokenizer has 4 tokens; data.vocabulary=3 must be at least that"),
        (b"the \xff sat", 4, "data.file is no UTF-8 text"),
    ],
)
def test_a_text_that_cannot_be_tokenised_is_refused(
    tmp_path: Path, content: bytes, vocabulary: int, message: str
) -> None:
    tokenizer, file = upload_tokenizer(tmp_path), upload(tmp_path, content)
    spec = FileTokens(file=file, encoding="text", tokenizer=tokenizer, sequence=1, vocabulary=vocabulary)
    with pytest.raises(ValueError, match=message):
        data.load(spec, DataLayout(tmp_path))
    assert not list(DataLayout(tmp_path).cache.rglob("*.uint16"))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    spec = FileTokens(
        file=upload(tmp_path, b"text"), encoding="text", tokenizer=upload(tmp_path, b"{}"), sequence=1, vocabulary=9
    )
    with pytest.raises(ValueError, match=r"data.tokenizer is no tokenizer.json"):
        data.load(spec, DataLayout(tmp_path))


@pytest.mark.parametrize("change", [{"encoding": "text"}, {"tokenizer": NO_FILE}])
def test_text_and_tokenizer_go_together(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"expected the id of a tokenizer.json with encoding=text"):
        FileTokens.model_validate({"file": NO_FILE, "sequence": 1, "vocabulary": 9, **change})


def train_on_a_file(folder: str, file: str) -> list[float]:
    """On two ranks: losses of a training on the bytes of a text."""
    spec = {"source": "file", "format": "tokens", "encoding": "text", "tokenizer": file.split()[1]}
    spec |= {"file": file.split(maxsplit=1)[0], "sequence": 16, "vocabulary": 4}
    loss: list[float] = train(folder, {**TRANSFORMER, "data": spec, "steps": 3, "parallel": {"dp_shard": 2}})["loss"]
    return loss


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_train_on_a_text_that_the_first_of_them_tokenises(tmp_path: Path, torchrun: Torchrun) -> None:
    file = upload(tmp_path, b"the cat sat\n" * 200)
    losses = torchrun(train_on_a_file, 2, folder=str(tmp_path), file=f"{file} {upload_tokenizer(tmp_path)}")[0]
    assert losses[-1] < losses[0]
