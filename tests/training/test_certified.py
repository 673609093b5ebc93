"""Certified training: the bounds hold, their gradients are right, and what it trains can be certified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import first_fast, slow_but_for
from safetensors.torch import load_file
from torch import Tensor
from training_runs import JOB, MLP, train

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.jobs.files import DataLayout
from service.jobs.plugins import Features, ModelConfig, ParallelSpec
from service.jobs.spec.data import DigitsData
from service.jobs.spec.model import ConvnetConfig, MlpConfig
from service.jobs.spec.objective import Certified
from service.models import build, data, load_into
from service.objectives import Objective, ObjectiveContext, objective_for
from service.objectives.certified import final_level, level, pair_rows
from service.parallel import mesh as meshes
from service.parallel.mesh import SINGLE
from service.parallel.pipeline.stage import Part

EPS = 0.04
CONFIGS: dict[str, ModelConfig] = {
    "mlp": MlpConfig(in_features=6, hidden=(5, 4), out_features=3, activation="tanh"),
    "convnet": ConvnetConfig(in_channels=1, height=2, width=3, channels=(2, 3), hidden=(4,), out_features=3),
}


def adapted(config: ModelConfig, certified: Certified) -> tuple[Objective, torch.nn.Module]:
    """One process's objective and model in float64, at the full level."""
    mesh = meshes.build(ParallelSpec(), "cpu")
    objective = objective_for(certified, ObjectiveContext(config, Features(6, 3, limits=(0.0, 1.0)), mesh, SINGLE))
    model = build(config, dtype=torch.float64, seed=3)
    objective.adapt(model, Part())
    objective.begin(certified.warmup + certified.ramp)
    return objective, model


@given(warmup=st.integers(0, 50), ramp=st.integers(0, 50), kappa=st.floats(0, 1), beta=st.floats(0, 1))
def test_the_level_rises_from_nothing_to_all_of_it(warmup: int, ramp: int, kappa: float, beta: float) -> None:
    config = Certified(eps=0.3, bound="crown-ibp", warmup=warmup, ramp=ramp, kappa=kappa, beta=beta)
    levels = [level(config, step) for step in range(warmup + ramp + 2)]
    assert all((each.eps, each.clean, each.crown) == (0, 1, 1) for each in levels[:warmup])
    assert (levels[-1].eps, levels[-1].clean, levels[-1].crown) == pytest.approx((0.3, kappa, beta))
    assert [each.eps for each in levels] == sorted(each.eps for each in levels)
    assert [each.clean for each in levels] == sorted((each.clean for each in levels), reverse=True)
    assert final_level(config).eps == 0.3


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("bound", slow_but_for(["ibp", "crown-ibp"], "crown-ibp"))
def test_no_input_of_the_box_is_below_the_bounds(family: str, bound: Any) -> None:
    config = CONFIGS[family]
    _, model = adapted(config, Certified(eps=0.2, bound=bound, beta=0.7))
    x = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outputs = model(x)
    plain = build(config, dtype=torch.float64, seed=3)
    assert torch.equal(outputs[:, 0], plain(x))
    for each in range(200):
        offset = 0.4 * torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(each)) - 0.2
        logits = plain((x + offset).clamp(0, 1))
        assert (logits.unsqueeze(2) - logits.unsqueeze(1) >= outputs[:, 1:] - 1e-12).all()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("bound", slow_but_for(["ibp", "crown-ibp"], "crown-ibp"))
def test_gradients_are_those_of_finite_differences(family: str, bound: Any) -> None:
    objective, model = adapted(CONFIGS[family], Certified(eps=0.1, bound=bound, kappa=0.3, beta=0.5))
    x = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0, 1, 2, 1])
    objective.mean(model(x), targets).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        assert parameter.grad is not None
        flat, index = parameter.data.view(-1), int(parameter.grad.abs().argmax())
        before, moved = flat[index].item(), []
        for step in (1e-6, -1e-6):
            flat[index] = before + step
            moved.append(objective.mean(model(x), targets).item())
        flat[index] = before
        assert parameter.grad.view(-1)[index].item() == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("limits", "value", "said"),
    [
        ({"lower": 0.25}, 0.125, r"objective\.lower: an input is 0\.125, outside of lower=0\.25, upper=None"),
        ({"upper": 0.75}, 0.875, r"objective\.upper: an input is 0\.875, outside of lower=None, upper=0\.75"),
        ({"lower": 0.1, "upper": 0.9}, 2.0, r"objective\.upper: an input is 2, outside of lower=0\.1, upper=0\.9"),
    ],
)
@pytest.mark.parametrize("training", first_fast(1, [True, False]))
def test_an_input_outside_of_the_given_limits_is_refused(
    limits: dict[str, float], value: float, said: str, training: bool
) -> None:
    _, model = adapted(CONFIGS["mlp"], Certified(eps=0.1, **limits))  # type: ignore[arg-type]
    model.float().train(training)
    # The limits themselves are inputs, though float32 has no 0.1.
    x = torch.tensor([limits.get("lower", 0.0), limits.get("upper", 1.0)]).expand(3, 2).reshape(1, 6).repeat(2, 1)
    model(x)
    x[1, 4] = value
    with pytest.raises(ValueError, match=said):
        model(x)


def test_an_input_outside_of_what_the_source_says_stays_in_its_box() -> None:
    _, model = adapted(CONFIGS["mlp"], Certified(eps=0.1))
    outputs = model(torch.full((1, 6), 1.5, dtype=torch.float64))
    logits = outputs[:, 0]
    assert (logits.unsqueeze(2) - logits.unsqueeze(1) >= outputs[:, 1:] - 1e-12).all()


@pytest.mark.parametrize("bound", ["ibp", "crown-ibp"])
def test_a_box_without_width_has_gradients_too(bound: Any) -> None:
    objective, model = adapted(
        MlpConfig(in_features=6, hidden=(5, 4), out_features=3), Certified(eps=0.1, bound=bound, warmup=4)
    )
    objective.begin(0)
    x, targets = torch.rand(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    loss = objective.mean(model(x), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(model(x)[:, 0], targets).item(), rel=1e-6)


def certified_share(weights: dict[str, Tensor], config: ModelConfig) -> float:
    """Test digits whose class is certified on the part of their ball that is an image, by the verifier's methods."""
    model = build(config)
    load_into(model, weights)
    test = data.load(DigitsData(), None).test
    samples = test.take(torch.arange(len(test)))
    box = Interval((samples.inputs - EPS).clamp(min=0), (samples.inputs + EPS).clamp(max=1))
    network = prepare(model.requires_grad_(False), (64,))
    bounds = METHODS["ibp"](network, box, BoundOptions()).lower_bounds(pair_rows(10, samples.inputs)).view(-1, 10, 10)
    margins = bounds[torch.arange(len(samples)), samples.targets]
    margins.scatter_(1, samples.targets.unsqueeze(1), 1.0)
    return float((margins > 0).all(dim=1).double().mean())


def test_what_it_trains_can_be_certified(tmp_path: Path) -> None:
    config = MlpConfig.model_validate(MLP["model"])
    spec = {**MLP, "steps": 200, "batch": {"global": 64}, "optimizer": {"lr": 5e-3}}
    objectives: dict[str, Any] = {"plain": "cross_entropy", "hard": {"name": "certified", "eps": EPS, "ramp": 120}}
    shares, results = {}, {}
    for name, objective in objectives.items():
        results[name] = train(tmp_path / name, {**spec, "objective": objective})["result"]
        weights = DataLayout(tmp_path / name).job(JOB).artifacts / "model.safetensors"
        shares[name] = certified_share(load_file(weights), config)
    assert shares["plain"] < 0.2
    assert shares["hard"] > 0.4
    assert results["hard"]["eval_accuracy"] > 0.75
    assert results["hard"]["eval_certified_accuracy"] == pytest.approx(shares["hard"], abs=0.006)  # two of 359 samples
