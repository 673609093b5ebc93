"""Modules of a package: what their constructor makes, and what they draw in a step, is the same in every layout."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from launching import Torchrun
from own_modules import (
    SPEC,
    Chain,
    Chosen,
    Drawing,
    Hooked,
    Limited,
    Listed,
    Moving,
    Restful,
    Resting,
    Tied,
    Warming,
    run,
    run_of,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from training_runs import JOB, train

from service.jobs.files import DataLayout
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.data import DataSpec
from service.jobs.spec.train import TrainSpec
from service.models import data, registry
from service.models.data import BatchOrder, Dataset, Split, load
from service.parallel import mesh
from service.parallel.collectives import DisagreementError
from service.training.setup import Training

OTHER = "job_" + "u" * 20
TOLERANCE = 1e-10  # as in test_layouts


def run_all(folder: str) -> dict[str, Any]:
    layouts = {"shards": {"parallel": {"dp_shard": 2}}, "replicas": {"parallel": {"dp_replicate": 2}}}
    found = {name: run(f"{folder}/{name}", 0.0, **layout) for name, layout in layouts.items()}
    dropping = {"parallel": {"dp_shard": 2}}
    found |= {name: run(f"{folder}/{name}", 0.5, **dropping) for name in ("dropout", "dropout again")}
    found["first half"] = run(f"{folder}/resumed", 0.5, **dropping, steps=2)
    found["second half"] = run(f"{folder}/resumed", 0.5, **dropping, job_id=OTHER, resume={"job": JOB})
    try:
        run(f"{folder}/scalar", 0.0, scalar=True, **dropping)
    except ValueError as error:
        found["scalar"] = str(error)
    for make, (name, layout) in product((Chosen, Chain), layouts.items()):
        found[f"{make.__name__} {name}"] = run_of(make, f"{folder}/{make.__name__} {name}", **layout)
    for make in (Hooked, Listed, Limited):
        try:
            run_of(make, f"{folder}/{make.__name__}", **dropping)
        except ValueError as error:
            found[make.__name__] = str(error)
    for name, other in (("labels", of_this_rank), ("digest", with_a_digest_of_this_rank)):
        try:
            with patch.object(data, "load", other):
                run(f"{folder}/{name}", 0.0, **dropping)
        except DisagreementError as error:
            found[name] = str(error)
    return found


def of_this_rank(spec: DataSpec, layout: DataLayout | None) -> Dataset:
    """Labels in another order on each rank, as one that numbers classes in the order of a set has them."""
    whole = load(spec, layout)
    train_split = cast(Split, whole.train)
    return replace(whole, train=replace(train_split, targets=train_split.targets.roll(int(os.environ["RANK"]))))


def with_a_digest_of_this_rank(spec: DataSpec, layout: DataLayout | None) -> Dataset:
    """As of one that adds noise from a generator without a seed."""
    return replace(load(spec, layout), sha256=os.environ["RANK"])


def reference() -> list[tuple[float, float]]:
    """Losses and gradient norms by plain torch in float64."""
    spec, model = TrainSpec.model_validate(SPEC), Tied(0.0).double()
    with patch.object(registry, "FAMILIES", SimpleNamespace(function=lambda family: lambda config, axis: Tied(0.0))):
        own = registry.build(cast(Any, spec.model), dtype=torch.float64)
    model.load_state_dict({name.removeprefix("blocks.0."): each for name, each in own.state_dict().items()})
    samples, rows = load(spec.data).train, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(4):
        batch = samples.take(BatchOrder(0, len(samples), 24).indices(step))
        loss = functional.cross_entropy(model(batch.inputs.double()), batch.targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rows.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("own")
    alone = {name: run(folder / name, dropout) for name, dropout in (("alone", 0.0), ("one", 0.5), ("two", 0.5))}
    return folder, torchrun(run_all, 2, folder=str(folder))[0] | alone


@pytest.mark.distributed
def test_what_the_constructor_makes_is_trained_in_every_layout(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, found = runs
    expected = reference()
    assert expected[0][0] == pytest.approx(math.log(10), rel=0.05)  # a last layer of zeros has only its bias
    for name in ("alone", "shards", "replicas"):
        assert found[name]["loss"] == pytest.approx([loss for loss, _ in expected], rel=TOLERANCE), name
        assert found[name]["grad_norm"] == pytest.approx([norm for _, norm in expected], rel=TOLERANCE), name
        weights = load_file(DataLayout(folder / name).job(JOB).artifacts / "model.safetensors")
        assert "a.weight" in weights
        assert "b.weight" not in weights
        assert sum(each.numel() for each in weights.values()) == found[name]["result"]["parameters"]


@pytest.mark.distributed
def test_what_is_drawn_in_a_step_follows_from_the_seed(runs: tuple[Path, dict[str, Any]]) -> None:
    _, found = runs
    assert found["dropout"]["loss"] == found["dropout again"]["loss"]
    assert found["one"]["loss"] == found["two"]["loss"] != found["alone"]["loss"]
    assert found["first half"]["loss"] + found["second half"]["loss"] == found["dropout"]["loss"]
    assert found["second half"]["grad_norm"] == found["dropout"]["grad_norm"][2:]


@pytest.mark.distributed
def test_a_scalar_that_cannot_be_divided_is_named(runs: tuple[Path, dict[str, Any]]) -> None:
    _, found = runs
    assert "the parameter 'blocks.0.temperature' has no dimension to divide over parallel.dp_shard" in found["scalar"]


@pytest.mark.distributed
@pytest.mark.parametrize("make", [Chosen, Chain])
def test_ranks_may_use_different_parameters(
    runs: tuple[Path, dict[str, Any]], tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    """As the micro-batches of one rank do; a parameter that nobody uses in a step is left as it was."""
    alone = run_of(make, tmp_path, batch={"global": 24, "micro": 12})
    weights = load_file(DataLayout(tmp_path).job(JOB).artifacts / "model.safetensors")
    for name in ("shards", "replicas"):
        found = runs[1][f"{make.__name__} {name}"]
        assert found["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE)
        assert found["grad_norm"] == pytest.approx(alone["grad_norm"], rel=TOLERANCE)
        paths = DataLayout(runs[0] / f"{make.__name__} {name}").job(JOB)
        for tensor, value in load_file(paths.artifacts / "model.safetensors").items():
            torch.testing.assert_close(value, weights[tensor], rtol=1e-6, atol=1e-8)


@pytest.mark.distributed
def test_what_a_sharded_parameter_would_lose_is_named(runs: tuple[Path, dict[str, Any]]) -> None:
    assert "the parameter 'blocks.0.enter.weight' has a hook on its gradient" in runs[1]["Hooked"]
    assert "the parameter 'blocks.0.enter.weight' is also in 'blocks.0.weights'" in runs[1]["Listed"]
    assert "the forward writes to the parameter 'blocks.0.enter.weight'" in runs[1]["Limited"]


@pytest.mark.parametrize("rules", [{}, {"name": "muon", "adamw": {"match": ["*.enter.*"], "lr": 1e-2}}])
def test_a_resumed_run_knows_which_parameters_had_no_gradient(tmp_path: Path, rules: dict[str, Any]) -> None:
    optimizer = {"lr": 1e-2, "weight_decay": 0.1, **rules}
    spec = {"batch": {"global": 24, "micro": 12}, "steps": 6, "optimizer": optimizer}
    whole = run_of(Chosen, tmp_path / "whole", **spec)
    half = run_of(Chosen, tmp_path / "halves", **{**spec, "steps": 2})
    rest = run_of(Chosen, tmp_path / "halves", **spec, job_id=OTHER, resume={"job": JOB})
    assert half["loss"] + rest["loss"] == whole["loss"]


@pytest.mark.distributed
def test_ranks_that_load_other_samples_are_told_apart(runs: tuple[Path, dict[str, Any]]) -> None:
    _, found = runs
    assert "the ranks disagree on the labels that data.source='digits' gives" in found["labels"]
    assert "the ranks disagree on the digest of the samples that data.source='digits' gives: 0 on" in found["digest"]


def test_a_tensor_that_training_changes_is_named_before_a_checkpoint(tmp_path: Path) -> None:
    class Counting(Tied):
        def forward(self, x: Tensor) -> Tensor:
            self.scale += 1e-3
            return super().forward(x)

    with (
        patch.object(registry, "FAMILIES", SimpleNamespace(function=lambda family: lambda config, axis: Counting(0.0))),
        pytest.raises(
            ValueError, match=r"'scale' of Counting is a tensor that forward changes, which checkpoints do not"
        ),
    ):
        train(tmp_path, SPEC, test_samples=8, state=torch.float64)


def test_a_chain_is_constructed_for_its_outline_and_for_its_stage(tmp_path: Path) -> None:
    made: list[nn.Module] = []
    run_of(lambda: made.append(Chain()) or made[-1], tmp_path, steps=1)  # type: ignore[func-returns-value]
    assert len(made) == 2


def test_a_number_that_forward_counts_is_named_in_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'calls' of Warming is a collection that forward changes, which checkpoints"):
        run_of(Warming, tmp_path, checkpoint={"every": 100})


@pytest.mark.parametrize(
    ("first", "then", "what"),
    [
        (lambda: np.ones(2), lambda held: held + 1, "an array"),
        (lambda: "first", lambda held: "then", "a value"),
        (lambda: SimpleNamespace(calls=[0]), lambda held: held.calls.append(1) or held, "a collection"),
        (lambda: None, lambda held: torch.ones(2) if held is None else held + 1, "a tensor"),
    ],
)
def test_state_beside_the_buffers_is_named_in_the_first_steps(
    tmp_path: Path, first: Callable[[], Any], then: Callable[[Any], Any], what: str
) -> None:
    class Keeping(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.kept = first()

        def forward(self, x: Tensor) -> Tensor:
            self.kept = then(self.kept)
            return super().forward(x)

    message = rf"'kept(\.calls)?' of Keeping is {what} that forward changes, which checkpoints do not"
    with pytest.raises(ValueError, match=message):
        run_of(Keeping, tmp_path, checkpoint={"every": 100})


def test_recomputation_reads_the_buffers_that_the_forward_has_read(tmp_path: Path) -> None:
    plain, again = (run_of(Moving, tmp_path / name, activation_checkpoint=name, steps=3) for name in ("none", "full"))
    assert again["loss"] == pytest.approx(plain["loss"], rel=TOLERANCE)


@pytest.mark.parametrize("make", [partial(Tied, 0.5), partial(Drawing, 0.0)])
def test_recomputation_draws_the_same(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    plain, again = (run_of(make, tmp_path / name, activation_checkpoint=name, steps=2) for name in ("none", "full"))
    assert plain["loss"] == again["loss"]


@pytest.mark.parametrize("make", [Resting, partial(Restful, 0.5)])
def test_a_part_that_is_in_evaluation_stays_so(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    plain = run(tmp_path / "plain", 0.0)
    evaluated = run_of(make, tmp_path / "evaluated", evaluate={"every": 2})
    assert evaluated["loss"] == plain["loss"]


def test_ranks_draw_differently_but_for_those_that_compute_the_same() -> None:
    def drawn(rank: int, step: int = 0) -> float:
        grid = mesh.plan(ParallelSpec(pp=2, dp_shard=2, tp=2), rank)
        Training.seed(cast(Any, SimpleNamespace(spec=SimpleNamespace(seed=0), mesh=grid)), "step", step)
        return torch.rand(()).item()

    found = [drawn(rank) for rank in range(8)]
    assert found[::2] == found[1::2]
    assert len({*found, drawn(0, step=1)}) == 5
