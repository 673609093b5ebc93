"""Labels that do not count: the loss is the mean over those of the global batch that do, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from launching import Torchrun
from torch import Tensor
from torch.nn import functional
from training_runs import train

from service.jobs.files import DataLayout
from service.jobs.plugins import IGNORED
from service.jobs.spec.data import DataSpec
from service.jobs.spec.train import TrainSpec
from service.models import build, data
from service.models.data import BatchOrder, Dataset, Split
from service.parallel.tensor import cross_entropy, vocabulary_parallel_cross_entropy

SAMPLES, TESTED, BATCH, STEPS = 20, 8, 12, 2
SUBJECTS: dict[str, dict[str, Any]] = {
    "tokens": {
        "model": {"family": "transformer", "vocab_size": 256, "dim": 16, "layers": 4, "heads": 2, "max_sequence": 8},
        "data": {"source": "tokens", "sequence": 8},
    },
    "classes": {
        "model": {"family": "mlp", "in_features": 12, "hidden": [16, 16, 16, 16], "out_features": 4},
        "data": {"source": "synthetic", "features": 12, "classes": 4, "samples": 64},
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"parallel": {"dp_shard": 2}, "batch": {"micro": 2}},
    "tp2": {"parallel": {"tp": 2}, "batch": {"micro": 3}},
    "pp2 1f1b": {"parallel": {"pp": 2}, "batch": {"micro": 2}},
    "replicate2": {"parallel": {"dp_replicate": 2}},
    "pp2 zero_bubble": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zero_bubble", "micro_batches": 12}},
    "pp2 zbv": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv", "micro_batches": 12}},
}
OF_TOKENS = ("dp2", "tp2", "pp2 1f1b")
"""One of each axis; the schedules of a pipeline are the matter of the smaller model."""
TOLERANCE = 1e-10  # as in test_layouts


def ignoring(split: Split) -> Split:
    """The same samples, of which every third has no label, and every sequence a prompt of another length."""
    targets = split.targets.clone()
    targets[::3] = IGNORED
    if targets.dim() > 1:
        for index, row in enumerate(targets):
            row[: index % len(row)] = IGNORED
    return replace(split, targets=targets)


load_whole = data.load


def load(spec: DataSpec, layout: DataLayout | None) -> Dataset:
    whole = load_whole(spec, layout)
    train, test = (part.take(torch.arange(count)) for part, count in ((whole.train, SAMPLES), (whole.test, TESTED)))
    return replace(whole, train=ignoring(train), test=ignoring(test))


def spec_of(subject: str, layout: dict[str, Any]) -> dict[str, Any]:
    return {**SUBJECTS[subject], "steps": STEPS, **layout, "batch": {"global": BATCH, **layout.get("batch", {})}}


def run(folder: Path, subject: str, layout: dict[str, Any]) -> dict[str, Any]:
    with patch.object(data, "load", load):
        return train(folder, spec_of(subject, layout), state=torch.float64)


def run_all(folder: str, subject: str) -> dict[str, Any]:
    layouts = OF_TOKENS if subject == "tokens" else LAYOUTS
    return {name: run(Path(folder, name), subject, LAYOUTS[name]) for name in layouts}


def reference(subject: str) -> tuple[float, float, float]:
    """The first loss and gradient norm, and the loss of evaluation before any step, by plain torch in float64."""
    spec = TrainSpec.model_validate(spec_of(subject, {}))
    dataset, model = load(spec.data, None), build(spec.model, dtype=torch.float64)  # type: ignore[arg-type]
    batch = dataset.train.take(BatchOrder(0, SAMPLES, BATCH).indices(0))

    def loss(split: Split) -> Tensor:
        inputs = split.inputs.double() if split.inputs.is_floating_point() else split.inputs
        outputs = model(inputs)
        return functional.cross_entropy(outputs.flatten(0, -2), split.targets.flatten())

    found = loss(batch)
    found.backward()  # type: ignore[no-untyped-call]
    squares = sum(float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None)
    return found.item(), squares**0.5, loss(dataset.test.take(torch.arange(TESTED))).item()


@pytest.mark.distributed
@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_layout_takes_the_mean_over_labels_that_count(tmp_path: Path, torchrun: Torchrun, subject: str) -> None:
    alone = run(tmp_path / "alone", subject, {})
    assert alone["loss"][0] == pytest.approx(reference(subject)[0], rel=TOLERANCE)
    assert alone["grad_norm"][0] == pytest.approx(reference(subject)[1], rel=TOLERANCE)
    one_by_one = run(tmp_path / "one by one", subject, {"batch": {"micro": 1}})
    found = torchrun(run_all, 2, folder=str(tmp_path), subject=subject)[0] | {"one by one": one_by_one}
    for name, got in found.items():
        for series in ("loss", "grad_norm", "eval_loss"):
            assert got[series] == pytest.approx(alone[series], rel=TOLERANCE), (name, series)


def test_evaluation_counts_labels_too(tmp_path: Path) -> None:
    spec = {**spec_of("classes", {}), "steps": 1, "optimizer": {"lr": 1e-30}}
    with patch.object(data, "load", load):
        assert train(tmp_path, spec, state=torch.float64)["eval_loss"] == pytest.approx(reference("classes")[2:])


def of_one_label(split: Split, label: int) -> Split:
    return replace(split, targets=torch.full_like(split.targets, label))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: replace(whole, test=whole.test.take(torch.arange(0))), "'synthetic' gives no sample to test"),
        (lambda whole: replace(whole, test=of_one_label(whole.test, IGNORED)), "no label of the 12 samples to test"),
        (
            lambda whole: replace(
                whole, train=replace(whole.train, targets=functional.one_hot(whole.train.targets).float())
            ),
            r"labels are torch.float32 of shape \('n', 4\); expected a whole number for each sample",
        ),
    ],
)
def test_samples_without_a_label_are_refused(
    tmp_path: Path, change: Callable[[Dataset], Dataset], message: str
) -> None:
    with (
        patch.object(data, "load", lambda spec, layout: change(load_whole(spec, layout))),
        pytest.raises(ValueError, match=message),
    ):
        train(tmp_path, spec_of("classes", {}))


def test_no_label_that_counts_is_zero_and_leaves_no_gradient() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    for loss in (cross_entropy, vocabulary_parallel_cross_entropy):
        logits.grad = None
        found = loss(logits, torch.full((3,), IGNORED))
        found.backward()  # type: ignore[no-untyped-call]
        assert found.item() == 0
        assert logits.grad is not None
        assert not logits.grad.any()


def test_an_objective_that_counts_every_label_is_refused(tmp_path: Path) -> None:
    spec = {**spec_of("classes", {}), "objective": {"name": "certified", "eps": 0.1}}
    with (
        patch.object(data, "load", load),
        pytest.raises(ValueError, match=r"objective.name='certified' needs a label for each sample; some are -100"),
    ):
        train(tmp_path, spec)
