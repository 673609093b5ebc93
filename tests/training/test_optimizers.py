"""Optimizers: each computes what torch's own, or its paper's formula, does, in float64 and in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import slow_but_for
from launching import Torchrun
from layout_groups import Groups
from pydantic import TypeAdapter
from torch import nn
from training_runs import MLP, TRANSFORMER, train

from service.jobs.plugins import OptimizerConfig
from service.jobs.spec.optimizer import OptimizerSpec
from service.training.optimizers import OptimizerError, Rule, Updater, updater_for

CPU = torch.device("cpu")
_specs: TypeAdapter[OptimizerConfig] = TypeAdapter(OptimizerSpec)
Reference = Callable[[dict[str, nn.Parameter]], Sequence[torch.optim.Optimizer]]

GROUPS = [{"match": ["0.bias"], "lr_scale": 0.5, "weight_decay": 0.3}, {"match": ["2.*"], "frozen": True}]


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, word for word."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.m = [torch.zeros_like(each) for each in parameters]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for theta, m in zip(self.param_groups[0]["params"], self.m, strict=True):
            g = theta.grad
            c = 0.9 * m + (1 - 0.9) * g
            theta.sub_(self.param_groups[0]["lr"] * (torch.sign(c) + 0.2 * theta))
            m.copy_(0.99 * m + (1 - 0.99) * g)


def of_torch(kind: Any, **fields: Any) -> Reference:
    return lambda named: [kind(list(named.values()), lr=0.01, **fields)]


def _muon(**fields: Any) -> Reference:
    def made(named: dict[str, nn.Parameter]) -> Sequence[torch.optim.Optimizer]:
        matrices = [named["0.weight"], named["1.weight"]]
        others = [value for name, value in named.items() if name not in ("0.weight", "1.weight")]
        adamw = torch.optim.AdamW(others, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
        return [torch.optim.Muon(matrices, lr=0.01, weight_decay=0.2, **fields), adamw]

    return made


ADAMW = {"match": ["2.weight"], "lr": 0.02, "weight_decay": 0.1}
CASES: dict[str, tuple[dict[str, Any], Reference]] = {
    "adamw": ({"weight_decay": 0.2}, of_torch(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.2)),
    "sgd": ({"name": "sgd", "weight_decay": 0.2}, of_torch(torch.optim.SGD, weight_decay=0.2)),
    "momentum": ({"name": "sgd", "momentum": 0.9}, of_torch(torch.optim.SGD, momentum=0.9)),
    "nesterov": (
        {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.2},
        of_torch(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.2),
    ),
    "lion": ({"name": "lion", "weight_decay": 0.2}, lambda named: [PlainLion(list(named.values()))]),
    "muon": ({"name": "muon", "weight_decay": 0.2, "adamw": ADAMW}, _muon()),
    "muon like adamw": (
        {"name": "muon", "weight_decay": 0.2, "nesterov": False, "adjust": "match_rms_adamw", "adamw": ADAMW},
        _muon(nesterov=False, adjust_lr_fn="match_rms_adamw"),
    ),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 9, bias=False), nn.Linear(9, 3)).double()


def updater_of(model: nn.Module, fields: dict[str, Any]) -> Updater:
    return updater_for(_specs.validate_python(fields), [model], dict(model.named_parameters()), CPU)


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_computes_what_torchs_own_does(name: str) -> None:
    fields, reference = CASES[name]
    own, other = network(), network()
    updater = updater_of(own, {"lr": 0.01, **fields})
    updater.prime(0, {})
    theirs = reference(dict(other.named_parameters()))
    bases = [[group["lr"] for group in each.param_groups] for each in theirs]
    for step in range(5):
        share = 1 / (1 + step)
        gradients(own, step), gradients(other, step)
        updater.step(share)
        for each, lrs in zip(theirs, bases, strict=True):
            for group, lr in zip(each.param_groups, lrs, strict=True):
                group["lr"] = lr * share
            each.step()
    for (key, left), right in zip(own.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, msg=key)


def test_updates_that_a_parameter_lacked_are_counted_where_its_rule_counts() -> None:
    own = network()
    weight, bias, last = (dict(own.named_parameters())[name] for name in ("0.weight", "0.bias", "2.bias"))
    updater = updater_of(own, {"name": "muon", "adamw": ADAMW})
    updater.prime(3, {bias: 1})
    gradients(own, 0)
    weight.grad = last.grad = None
    updater.step(1.0)
    assert updater.behind(4) == {bias: 2, last: 3}


class Keeping(torch.optim.SGD):
    """Counts its steps in a place that no checkpoint has."""

    steps = 0

    def __init__(self, parameters: Any, place: str) -> None:
        super().__init__([{"params": list(parameters), "peak": 0.1, "steps": 0}])
        self.place = place

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        group = self.param_groups[0]
        held = {"group": group, "state": self.state[group["params"][0]], "attribute": vars(self)}[self.place]
        held["steps"] = held.get("steps", 0) + 1


@pytest.mark.parametrize(
    ("place", "name"),
    [("group", r"param_groups\[0\]\['steps'\]"), ("state", r"state\[…\]\['steps'\]"), ("attribute", "steps")],
)
def test_what_an_optimizer_keeps_beside_its_moments_is_named(place: str, name: str) -> None:
    own = network()
    updater = Updater([Rule("keeping", Keeping(own.parameters(), place), (), (), counts=False)], [])
    updater.prime(0, {})
    updater.check_state()
    gradients(own, 0)
    updater.step(1.0)
    if place == "attribute":  # what is set first may stay
        updater.check_state()
        updater.step(1.0)
    with pytest.raises(ValueError, match=f"the attribute .{name}. of Keeping is .*checkpoints do not hold"):
        updater.check_state()


def test_groups_have_their_rate_and_decay_and_frozen_ones_stay() -> None:
    own, other = network(), network()
    updater = updater_of(own, {"lr": 0.01, "groups": GROUPS})
    updater.prime(0, {})
    named = dict(other.named_parameters())
    rest = [named["0.weight"], named["1.weight"]]
    reference = torch.optim.AdamW(
        [{"params": [named["0.bias"]], "lr": 0.005, "weight_decay": 0.3}, {"params": rest}],
        lr=0.01,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    for step in range(3):
        gradients(own, step), gradients(other, step)
        updater.drop_frozen()
        updater.step(1.0)
        reference.step()
    for (key, left), right in zip(own.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, msg=key)
    own[0].requires_grad_(False)  # type: ignore[index]
    assert updater.names() == {"adamw": ["1.weight"], "frozen": ["0.bias", "0.weight", "2.weight", "2.bias"]}
    assert not any(updater.moments(parameter) for parameter in own[2].parameters())  # type: ignore[index]


def test_a_model_that_leaves_nothing_to_learn_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"every parameter is frozen, by the model or by optimizer.groups"):
        updater_of(network().requires_grad_(False), {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": [{"match": ["0.weights"]}]}, "optimizer.groups.0.match: .* name: '0.weights'; expected .* 0.w"),
        ({"name": "muon", "adamw": {"match": ["head.*"]}}, "optimizer.adamw.match: no parameter has this name: 'head"),
        ({"groups": [{"match": ["*"], "frozen": True}]}, "every parameter is frozen"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        updater_of(network(), fields)


HEAD = {"match": ["head.weight"]}
SUBJECTS: dict[str, dict[str, Any]] = {
    "momentum": {**MLP, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}},
    "lion": {**MLP, "optimizer": {"name": "lion", "lr": 1e-3, "weight_decay": 0.1}},
    "muon": {**MLP, "optimizer": {"name": "muon", "lr": 1e-2, "weight_decay": 0.1, "adamw": HEAD}},
    "muon of a transformer": {
        **TRANSFORMER,
        # 257 rows divide over no two ranks, and the head with its padded rows is Muon's here.
        "model": {**TRANSFORMER["model"], "layers": 4, "vocab_size": 257},
        "optimizer": {"name": "muon", "lr": 1e-2, "adamw": {"match": ["embedding.*"]}},
    },
    "groups": {
        **TRANSFORMER,
        "model": {**TRANSFORMER["model"], "layers": 4},
        "optimizer": {
            "lr": 3e-3,
            "weight_decay": 0.1,
            "groups": [
                {"match": ["*norm*"], "weight_decay": 0},
                {"match": ["embedding.*", "blocks.0.*"], "frozen": True},
                {"match": ["head.*"], "lr_scale": 0.1},
            ],
        },
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"parallel": {"dp_shard": 2}},
    "tp2": {"parallel": {"tp": 2}},
    "pp2": {"parallel": {"pp": 2}},
    "pp2 zbv": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}},
    "hsdp2x2": {"parallel": {"dp_replicate": 2, "dp_shard": 2}},
    "fsdp2 tp2": {"parallel": {"dp_shard": 2, "tp": 2}},
}
ZBV = ("muon of a transformer", "groups")
RUNS = [(subject, layout) for subject in SUBJECTS for layout in LAYOUTS if layout != "pp2 zbv" or subject in ZBV]
FAST = (("momentum", "fsdp2"), ("lion", "tp2"), ("muon", "fsdp2"), ("muon", "tp2"), ("groups", "pp2"))


def run_all(folder: str, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        f"{subject} {layout}": train(
            Path(folder, subject, layout),
            {**SUBJECTS[subject], **LAYOUTS.get(layout, {}), "steps": 3},
            test_samples=37,
            state=torch.float64,
        )
        for subject, layout in cases
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun) -> Groups:
    ranks = {(subject, layout): 4 if "2x2" in layout or " tp2" in layout else 2 for subject, layout in RUNS}
    return Groups(tmp_path_factory.mktemp("optimizers"), torchrun, run_all, ranks, FAST)


@pytest.mark.distributed
@pytest.mark.parametrize(("subject", "layout"), slow_but_for(RUNS, *FAST))
def test_layout_equals_the_single_process(outcomes: Groups, subject: str, layout: str) -> None:
    outcomes.expect_the_same(subject, layout, 1e-10)
