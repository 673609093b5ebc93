"""Modules that were not written as models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn

from service.jobs.plugins import Features, ModelConfig, Samples
from service.jobs.spec.common import ParallelSpec
from service.models import build, registry
from service.models.initialize import Constant, Distribution
from service.parallel import mesh
from service.parallel.tensor import distribute


class Settings(ModelConfig):
    family: Literal["mine"] = "mine"

    @property
    def reads(self) -> Samples:
        return Features(3, 2)


def network(config: Settings, axis: object) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 2))


def built(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], **options: Any) -> nn.Module:
    monkeypatch.setattr(registry, "FAMILIES", SimpleNamespace(function=lambda family: lambda config, axis: make()))
    return build(Settings(), **options)


def test_it_is_built_with_weights_that_depend_on_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", SimpleNamespace(function=lambda family: network))
    state = torch.get_rng_state()
    model, same, other = (build(Settings(), seed=seed) for seed in (1, 1, 2))
    x = torch.rand(5, 3)
    assert model(x).shape == (5, 2)
    assert torch.equal(model(x), same(x))
    assert not torch.equal(model(x), other(x))
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(5, 3), x)


class Own(nn.Module):
    """Everything that a constructor may do to its weights: tie, fill, leave a row at zero, keep a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, padding_idx=0)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(4, 4)
        nn.init.constant_(self.out.weight, 0.5)
        nn.init.zeros_(self.out.bias)
        self.out.bias.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(3.0))
        self.scale = torch.full((4,), 2.0)
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.out(self.embed(ids)) * self.scale + self.shift) * self.temperature


def test_what_its_constructor_makes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(monkeypatch, Own, dtype=torch.float64)
    own = model.get_submodule("blocks.0")
    assert own.head.weight is own.embed.weight
    assert own.embed.weight[0].abs().max() == 0 < own.embed.weight.abs().max()
    assert (own.out.weight == 0.5).all()
    assert not own.out.bias.requires_grad
    assert own.temperature.item() == 3.0
    assert own.scale.tolist() == [2.0] * 4
    assert {each.dtype for each in model.parameters()} == {torch.float64}
    assert list(model.state_dict()) == [f"blocks.0.{name}" for name in Own().state_dict()]
    planned = built(monkeypatch, Own, device="meta")
    assert [each.shape for each in planned.parameters()] == [each.shape for each in model.parameters()]


def test_its_own_distribution_counts_more_than_its_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawn(nn.Linear):
        def distribution(self, name: str) -> Distribution:
            return Constant({"weight": 3.0, "bias": 1.0}[name])

    model = built(monkeypatch, lambda: Drawn(2, 2))
    assert [each.unique().tolist() for each in model.parameters()] == [[3.0], [1.0]]


def test_a_constructor_that_looks_at_values_is_built_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        layer = nn.Linear(2, 2)
        assert torch.linspace(0, 1, 3)[2].item() == 1.0
        return layer

    assert {each.device.type for each in built(monkeypatch, make).parameters()} == {"cpu"}
    assert {each.device.type for each in built(monkeypatch, make, device="meta").parameters()} == {"meta"}


def test_it_is_neither_divided_nor_cut() -> None:
    assert [path for path, *_ in Settings().check_parallel(ParallelSpec(tp=2), 1)] == ["parallel.tp"]
    assert [path for path, *_ in Settings().check_parallel(ParallelSpec(pp=2), 2)] == ["parallel.pp"]
    assert Settings().check_parallel(ParallelSpec(dp_shard=2), 1) == []


def having(name: str, make: Callable[[], Any]) -> Callable[[], nn.Module]:
    def construct() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2))
        setattr(module[0], name, make())
        return module

    return construct


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (having("noise", lambda: torch.randn(3)), "'0.noise' of Sequential is a tensor that its constructor draws"),
        (having("masks", lambda: [torch.ones(3)]), "'0.masks' of Sequential is a collection of tensors"),
        (having("draws", torch.Generator), "'0.draws' of Sequential is a generator of random numbers"),
        (having("draws", lambda: {"all": [torch.Generator()]}), r".0\.draws\['all'\]. of Sequential is a generator"),
        (having("count", itertools.count), "'0.count' of Sequential is an iterator, which a resumed run would begin"),
    ],
)
def test_what_a_checkpoint_would_lose_is_named(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ValueError, match=f"the attribute {message}"):
        built(monkeypatch, make)


def test_a_state_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> Any:
            return {}

    with pytest.raises(ValueError, match="0 has get_extra_state: checkpoints hold tensors alone"):
        built(monkeypatch, lambda: nn.Sequential(Stateful(2, 2)))


def test_a_constant_of_a_planned_chain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chain(nn.Module):
        before_blocks = after_blocks = ()

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({"0": nn.Linear(2, 2)})
            self.scale = torch.ones(2)

    with pytest.raises(ValueError, match="Chain has a tensor that is no parameter, 'scale'"):
        built(monkeypatch, Chain)


class Planned(nn.Module):
    before_blocks = after_blocks = ()

    def __init__(self, change: Callable[[nn.Module, nn.Module], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
        change(self.blocks["0"], self.blocks["1"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one, _: one.weight.register_hook(torch.neg), "'blocks.0.weight' has a hook on its gradient, which the"),
        (
            lambda one, other: setattr(other, "scales", [one.bias]),
            "'blocks.0.bias' is also in 'blocks.1.scales', which",
        ),
        (
            lambda one, other: setattr(other, "weight", one.weight),
            r"Planned has one parameter as 'blocks.0.weight' and as 'blocks.1.weight', .* expected tied",
        ),
    ],
)
def test_what_the_weights_of_a_planned_chain_would_lose_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module, nn.Module], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        built(monkeypatch, lambda: Planned(change))


def outlined(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], **options: Any) -> None:
    monkeypatch.setattr(registry, "FAMILIES", SimpleNamespace(function=lambda family: lambda config, axis: make()))
    registry.outline(Settings(), **options)


def chained(one: nn.Module, other: nn.Module) -> None:
    one.register_parameter("also", one.weight)  # type: ignore[arg-type]
    one.register_parameter("again", one.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tied", "stages", "message"),
    [
        (
            {"blocks.0.also": "blocks.0.weight", "blocks.0.again": "blocks.0.also"},
            1,
            "'blocks.0.also' for 'blocks.0.again', which is a second place itself; expected .* 'blocks.0.weight'",
        ),
        ({"blocks.0.also": "blocks.0.weight", "blocks.0.again": "blocks.0.weight"}, 1, "Tied has no output_axis"),
        ({"blocks.0.also": "blocks.0.weight", "blocks.0.again": "blocks.0.weight"}, 3, "2 blocks .* into 3 stages"),
    ],
)
def test_what_a_model_cannot_do_is_said_by_its_outline(
    monkeypatch: pytest.MonkeyPatch, tied: dict[str, str], stages: int, message: str
) -> None:
    """Before a job reads its data, or a check of a compiler begins."""

    class Tied(Planned):
        def __init__(self) -> None:
            super().__init__(chained)
            self.tied = tied

    with pytest.raises(ValueError, match=message):
        outlined(monkeypatch, Tied, stages=stages)


def test_a_plain_module_is_outlined_for_no_tensor_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"expected parallel\.tp=1, got 2"):
        outlined(monkeypatch, lambda: nn.Linear(3, 2), axis=mesh.Axis(2, 0))


def test_what_a_divided_parameter_would_lose_is_named() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(torch.neg)
    with pytest.raises(
        ValueError, match=r"'weight' has a hook on its gradient, which the parameters of parallel\.tp do"
    ):
        distribute(layer, (), cast(Any, "a mesh"))


@pytest.mark.parametrize("blocks", [nn.ModuleList, lambda layers: nn.ModuleDict({"first": layers[0]})])
def test_what_a_module_calls_blocks_makes_it_no_chain(monkeypatch: pytest.MonkeyPatch, blocks: Any) -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.blocks = blocks([nn.Linear(2, 2)])
        return module

    assert len(list(built(monkeypatch, make).parameters())) == 2
    with pytest.raises(ValueError, match=r"family 'mine' builds no chain .* expected parallel.tp=1, got 2"):
        built(monkeypatch, make, mesh=mesh.plan(ParallelSpec(tp=2)))
