"""Weights in uploaded files: their names, and what is refused at submit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from service.formats.weights import WeightsFileError, check_weights
from service.jobs.files import DataLayout
from service.jobs.spec.families import MlpConfig, TransformerConfig
from service.jobs.spec.model import FromSafetensors
from service.models import WeightsError, build, load_into
from service.models.mlp import Mlp
from service.models.reference import resolve

CONFIG = MlpConfig(in_features=3, hidden=(5, 4), out_features=2)


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "net."])
def test_names_of_a_sequential_and_of_wrappers_are_those_of_the_model(prefix: str, tmp_path: Path) -> None:
    data, net, file = DataLayout(tmp_path), sequential(), "file_" + "0a" * 32
    data.file(file).parent.mkdir(parents=True)
    save_file({prefix + name: tensor for name, tensor in net.state_dict().items()}, data.file(file))
    check_weights(data.file(file), CONFIG)
    _, weights = resolve(FromSafetensors(safetensors=file, config=CONFIG), data)
    model, x = Mlp(CONFIG), torch.randn(4, 3)
    model.load_state_dict(dict(weights or {}))
    assert torch.equal(model(x), net(x))


def test_the_models_own_names_stay_as_they_are(tmp_path: Path) -> None:
    save_file(dict(Mlp(CONFIG).state_dict()), tmp_path / "own")
    check_weights(tmp_path / "own", CONFIG)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04" + bytes(20), "a file of torch.save"),
        (b"\x80\x02" + bytes(20), "a file of torch.save"),
        (b"\xff" * 20, "no safetensors file"),
        (b"", "no safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "no safetensors file"),
    ],
    ids=["zip", "pickle", "length", "nothing", "list"],
)
def test_what_is_no_safetensors_file_is_told(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(WeightsFileError, match=words):
        check_weights(tmp_path / "file", CONFIG)


@pytest.mark.parametrize(
    ("hidden", "words"), [((5, 6), "'2.weight' has shape .4, 5.; 'blocks.1.linear.weight'"), ((5,), "no weights for")]
)
def test_misfits_are_told(hidden: tuple[int, ...], words: str, tmp_path: Path) -> None:
    save_file(sequential().state_dict(), tmp_path / "file")
    with pytest.raises(WeightsFileError, match=words):
        check_weights(tmp_path / "file", MlpConfig(in_features=3, hidden=hidden, out_features=2))


def own_weights(**change: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**{name: torch.zeros_like(value) for name, value in Mlp(CONFIG).state_dict().items()}, **change}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks.2.linear.weight": torch.ones(4, 4)}, "it has 'blocks.2.linear.weight', which a model of this"),
        ({"ema.head.bias": torch.ones(2)}, "it has 'ema.head.bias', which a model of this configuration has not"),
        ({"module.head.bias": torch.ones(2)}, "it has 'head.bias' twice, as .*module.head.bias"),
        ({"blocks.0._orig_mod.linear.bias": torch.ones(5)}, "it has 'blocks.0.linear.bias' twice"),
        ({"head.bias": torch.ones(2, dtype=torch.int64)}, "it has 'head.bias' of the type I64; expected one of F64"),
        ({"head.bias": torch.ones(2, dtype=torch.complex64)}, "it has 'head.bias' of the type C64"),
    ],
)
def test_tensors_that_would_not_count_are_refused_by_name(
    change: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    data, file = DataLayout(tmp_path), "file_" + "0a" * 32
    data.file(file).parent.mkdir(parents=True)
    save_file(own_weights(**change), data.file(file))
    with pytest.raises(WeightsFileError, match=words):
        check_weights(data.file(file), CONFIG)
    with pytest.raises(WeightsError, match=words):
        resolve(FromSafetensors(safetensors=file, config=CONFIG), data)


def test_on_a_rank_any_family_names_what_it_has_not(tmp_path: Path) -> None:
    data, file = DataLayout(tmp_path), "file_" + "0b" * 32
    config = TransformerConfig(vocab_size=8, dim=4, layers=1, heads=2, tied_embeddings=True)
    data.file(file).parent.mkdir(parents=True)
    own = {name: tensor.clone() for name, tensor in build(config).state_dict().items()}
    save_file(own, data.file(file))
    resolve(FromSafetensors(safetensors=file, config=config), data)
    save_file(own | {"head.weight": own["embedding.weight"] + 1}, data.file(file))
    with pytest.raises(WeightsError, match=r"'head.weight' differs from 'embedding.weight', which are one parameter"):
        resolve(FromSafetensors(safetensors=file, config=config), data)
    save_file(own | {"blocks.1.attention_norm.weight": torch.ones(4)}, data.file(file))
    with pytest.raises(WeightsError, match=r"it has 'blocks.1.attention_norm.weight', which"):
        resolve(FromSafetensors(safetensors=file, config=config), data)


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    model = Mlp(CONFIG)
    with pytest.raises(WeightsError, match=r"weights for 'head.bias' are not all finite"):
        load_into(model, own_weights(**{"head.bias": torch.tensor([0.0, torch.nan])}))
