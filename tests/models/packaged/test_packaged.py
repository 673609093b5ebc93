"""Models that installed packages have by name."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save
from torch import nn
from training_runs import upload

from service.formats.weights import PACKAGED, WeightsFileError, check_weights
from service.jobs.files import DataLayout
from service.jobs.plugins import ModelConfig
from service.jobs.spec.model import ModelRef
from service.models import WeightsError, build, load_into
from service.models.packaged import base
from service.models.reference import resolve

_reference: TypeAdapter[ModelConfig] = TypeAdapter(ModelRef)
SMALL = {"family": "timm", "name": "resnet10t", "channels": 1, "height": 16, "width": 16, "classes": 5}


def config(**changes: Any) -> ModelConfig:
    return _reference.validate_python({**SMALL, **changes})


needs_packages = pytest.mark.skipif(
    find_spec("timm") is None or find_spec("torchvision") is None, reason="the extra `families` is not installed"
)


def built(**changes: Any) -> nn.Module:
    return build(config(**changes))


@needs_packages
def test_an_architecture_reads_flat_pictures() -> None:
    model = built(options={"drop_rate": 0.5})
    assert model(torch.rand(3, 256)).shape == (3, 5)
    assert config().reads.shape == (1, 16, 16)


@needs_packages
def test_an_architecture_of_one_size_is_built_for_ours() -> None:
    model = built(name="vit_tiny_patch16_224", channels=3, height=32, width=32, options={"depth": 1})
    assert model(torch.rand(2, 3 * 32 * 32)).shape == (2, 5)


@needs_packages
def test_torchvision_reads_colours() -> None:
    model = build(
        _reference.validate_python(
            {"family": "torchvision", "name": "squeezenet1_1", "height": 32, "width": 32, "classes": 5}
        )
    )
    assert model(torch.rand(2, 3 * 32 * 32)).shape == (2, 5)


@needs_packages
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "resnet10"}, r"model.name: timm has no architecture 'resnet10'; nearest are .*resnet10t"),
        ({"options": {"drop_rat": 0.5}}, r"model.options: resnet10t: timm cannot build it: TypeError: .*'drop_rat'"),
        ({"frozen": ["layer"]}, r"model.frozen: no parameter begins with 'layer'; nearest are layer"),
    ],
)
def test_what_a_package_does_not_have_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pretrained": True}, "'pretrained' is about weights from elsewhere"),
        ({"checkpoint_path": "/tmp/x.pth"}, "'checkpoint_path' is about weights from elsewhere"),
        ({"_builder": "x"}, "'_builder' is a name of the package's own"),
        ({"act_layer": {"nested": 1}}, "should be a valid"),
    ],
)
def test_options_that_are_more_than_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(options=options)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    monkeypatch.setattr(base, "import_module", lambda name: __import__(f"absent_{name}"))
    with pytest.raises(ValueError, match=r"this host has no package 'absent_timm'.* extra `families`"):
        build(config())


def gpt2(task: str = "causal-lm", **changes: Any) -> dict[str, Any]:
    fields = {"model_type": "gpt2", "vocab_size": 32, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    fields |= {"bos_token_id": 0, "eos_token_id": 0, **changes}
    return {"family": "huggingface", "config": fields, "task": task, "sequence": 8}


def bert(**changes: Any) -> dict[str, Any]:
    fields = {"model_type": "bert", "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, **changes}
    fields |= {"num_attention_heads": 2, "intermediate_size": 8}
    return {"family": "huggingface", "config": fields, "sequence": 8}


needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="the extra `families` is not installed"
)


@needs_transformers
def test_a_language_model_is_built_of_a_configuration() -> None:
    model = build(_reference.validate_python(gpt2()))
    assert model(torch.randint(0, 32, (2, 8))).shape == (2, 8, 32)
    assert build(_reference.validate_python(bert(is_decoder=True))).training
    assert "blocks.0.network.lm_head.weight" not in dict(model.named_parameters())  # one with the embedding


@needs_transformers
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            gpt2(model_type="gptt2"),
            "model.config.model_type: transformers has no architecture 'gptt2'; nearest are gpt2",
        ),
        (gpt2(n_embed=8), "model.config.n_embed: gpt2 has no such field; nearest are n_embd"),
        (gpt2(n_head=3), "model.config: transformers cannot build it: .*must be divisible by num_heads"),
        (gpt2(n_embd=-4), "model.config: transformers cannot build it: RuntimeError: .*negative dimension -4"),
        (gpt2(n_positions=7), "^model.sequence: 8 is more than model.config.n_positions=7; expected at most 7"),
        (
            {"family": "huggingface", "config": {"model_type": "vit", "vocab_size": 3}, "sequence": 8},
            "model.config.vocab_size: vit has no such field",
        ),
        (
            {
                "family": "huggingface",
                "config": {"model_type": "llama", "num_labels": 3},
                "task": "image-classification",
                "image": [3, 8, 8],
            },
            "llama has no model for task=image-classification",
        ),
        (bert(), "model.config: bert sees the tokens that it is to predict; expected is_decoder: true"),
    ],
)
def test_a_configuration_that_is_none_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(_reference.validate_python(given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (gpt2(auto_map={"AutoModel": "evil--code"}), "'auto_map' is code"),
        (gpt2(text_config={"deep": [{"trust_remote_code": True}]}), "'trust_remote_code' is code"),
        (gpt2(_attn_implementation="them/kernels"), "'_attn_implementation' is a name of the package's own"),
        (gpt2(attn_implementation="them/kernels"), "'attn_implementation' is a choice of kernels"),
        (gpt2(vocab_size=None), "task=causal-lm needs it"),
        (gpt2("image-classification"), "task=image-classification needs it"),
        (gpt2(model_type=3), "it says which model this is"),
        (gpt2(output_router_logits=True), "a loss of its own balances experts"),
        (gpt2(problem_type="regression"), "the objective is the cross entropy of one label"),
    ],
)
def test_a_configuration_that_is_more_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _reference.validate_python(given)


def zipped(members: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(made := io.BytesIO(), "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()


def tarred(members: dict[str, bytes]) -> bytes:
    with tarfile.open(fileobj=(made := io.BytesIO()), mode="w") as archive:
        for name, content in members.items():
            (about := tarfile.TarInfo(name)).size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return made.getvalue()


@needs_packages
def test_a_package_s_own_weights_are_taken(tmp_path: Path) -> None:
    theirs = {name.removeprefix(PACKAGED): value for name, value in built().state_dict().items()}
    theirs["conv1.0.weight"] = torch.ones_like(theirs["conv1.0.weight"])
    theirs["bn1.running_mean"] = torch.full_like(theirs["bn1.running_mean"], 3.0)
    file = upload(tmp_path, save(theirs))
    own, weights = resolve(_reference.validate_python({**SMALL, "safetensors": file}), DataLayout(tmp_path))
    assert weights is not None
    load_into(model := build(own, seed=1), weights)
    network = model.get_submodule("blocks.0.network")
    assert (network.conv1[0].weight == 1).all()
    assert (network.bn1.running_mean == 3).all()
    file = upload(tmp_path, save({name: value for name, value in theirs.items() if name != "bn1.running_mean"}))
    _, weights = resolve(_reference.validate_python({**SMALL, "safetensors": file}), DataLayout(tmp_path))
    with pytest.raises(WeightsError, match=r"no weights for 'blocks.0.network.bn1.running_mean'"):
        load_into(model, cast(Any, weights))


@needs_transformers
@pytest.mark.parametrize("pack", [zipped, tarred])
def test_an_archive_of_a_package_s_weights_is_taken(tmp_path: Path, pack: Callable[[dict[str, bytes]], bytes]) -> None:
    given = _reference.validate_python(gpt2())
    theirs = {name.removeprefix(PACKAGED): each.detach() for name, each in build(given, seed=1).named_parameters()}
    first, *rest = theirs
    parts = {"a": {first: theirs[first]}, "b": {name: theirs[name] for name in rest}}
    file = upload(
        tmp_path, pack({"config.json": b"{}", **{f"{part}.safetensors": save(parts[part]) for part in parts}})
    )
    reference = _reference.validate_python({**gpt2(), "safetensors": file})
    check_weights(DataLayout(tmp_path).file(file), given)
    own, weights = resolve(reference, DataLayout(tmp_path))
    load_into(model := build(own, seed=2), cast(Any, weights))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name.removeprefix(PACKAGED)])
    file = upload(tmp_path, pack({"weights.safetensors": save(theirs)}))
    with pytest.raises(WeightsFileError, match=r"the archive has no config.json"):
        check_weights(DataLayout(tmp_path).file(file), given)


@needs_packages
def test_frozen_parts_neither_learn_nor_count() -> None:
    model = built(frozen=["conv1", "bn1"])
    network = model.get_submodule("blocks.0.network")
    before = network.bn1.running_mean.clone()
    model(torch.rand(2, 256)).sum().backward()
    assert torch.equal(network.bn1.running_mean, before)
    assert network.layer1[0].bn1.training
    learning = {name.split(".")[0] for name, each in network.named_parameters() if each.grad is not None}
    assert learning == {"layer1", "layer2", "layer3", "layer4", "fc"}
