"""Models that installed packages have by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from service.jobs.plugins import ModelConfig
from service.jobs.spec.model import ModelRef
from service.models import build
from service.models.packaged import base

_reference: TypeAdapter[ModelConfig] = TypeAdapter(ModelRef)
SMALL = {"family": "timm", "name": "resnet10t", "channels": 1, "height": 16, "width": 16, "classes": 5}


def config(**changes: Any) -> ModelConfig:
    return _reference.validate_python({**SMALL, **changes})


def built(**changes: Any) -> nn.Module:
    pytest.importorskip("timm", reason="the extra `families` is not installed")
    return build(config(**changes))


def test_an_architecture_reads_flat_pictures() -> None:
    model = built(options={"drop_rate": 0.5})
    assert model(torch.rand(3, 256)).shape == (3, 5)
    assert config().reads.shape == (1, 16, 16)


def test_an_architecture_of_one_size_is_built_for_ours() -> None:
    model = built(name="vit_tiny_patch16_224", channels=3, height=32, width=32, options={"depth": 1})
    assert model(torch.rand(2, 3 * 32 * 32)).shape == (2, 5)


def test_torchvision_reads_colours() -> None:
    pytest.importorskip("timm", reason="the extra `families` is not installed")
    model = build(
        _reference.validate_python(
            {"family": "torchvision", "name": "squeezenet1_1", "height": 32, "width": 32, "classes": 5}
        )
    )
    assert model(torch.rand(2, 3 * 32 * 32)).shape == (2, 5)


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
    monkeypatch.setattr(base, "import_module", lambda name: __import__(f"absent_{name}"))
    with pytest.raises(ValueError, match=r"this host has no package 'absent_torchvision'.* extra `families`"):
        build(config())


def test_frozen_parts_neither_learn_nor_count() -> None:
    model = built(frozen=["conv1", "bn1"])
    network = model.get_submodule("blocks.0.network")
    before = network.bn1.running_mean.clone()
    model.eval()
    model.train()
    model(torch.rand(2, 256)).sum().backward()
    assert torch.equal(network.bn1.running_mean, before)
    assert network.layer1[0].bn1.training
    learning = {name.split(".")[0] for name, each in network.named_parameters() if each.grad is not None}
    assert learning == {"layer1", "layer2", "layer3", "layer4", "fc"}
