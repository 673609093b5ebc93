"""Runs that are killed at any step, and checkpoints that any layout takes over from any other."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import GroupFailureError, Torchrun
from safetensors.torch import load_file
from torch import Tensor, nn
from training_runs import JOB, TRANSFORMER, train

from service.jobs.files import DataLayout
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import TransformerConfig
from service.models import build
from service.models.full_weights import gather
from service.parallel import checkpoint, distributed
from service.parallel import mesh as meshes
from service.parallel.checkpoint import storage
from service.parallel.fsdp import Precision, apply_fsdp
from service.parallel.pipeline.stage import Part
from service.training.checkpoints import model_tensors
from service.training.loop import Loop

STEPS = 8
SPEC: dict[str, Any] = {**TRANSFORMER, "steps": STEPS, "parallel": {"dp_shard": 2}}


def train_until_killed(folder: str, moment: str) -> None:
    """On two ranks, with a checkpoint every three steps: one of them is killed, in the second save or in a step.

    In the save, the shards are written and nothing is published; in the step, the save of the one before may have got
    anywhere.
    """
    publish, advance = storage.publish, Loop.advance

    def publish_or_die(target: Path, step: int, *rest: Any) -> None:
        if step == 6 and moment == "save":
            os.kill(os.getpid(), signal.SIGKILL)
        publish(target, step, *rest)

    def advance_or_die(loop: Loop) -> Any:
        if loop.step == 6 and moment == "step" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return advance(loop)

    storage.publish = publish_or_die
    Loop.advance = advance_or_die  # type: ignore[method-assign]
    train(folder, {**SPEC, "checkpoint": {"every": 3, "keep": 3}}, test_samples=8)


def take_up(killed: str, whole: str) -> dict[str, Any]:
    """On two ranks: the rest of the killed run, and a run that nothing happened to."""
    return {name: train(folder, SPEC, test_samples=8) for name, folder in (("rest", killed), ("whole", whole))}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("moment", ["save", "step"])
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path, torchrun: Torchrun, moment: str) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with pytest.raises(GroupFailureError, match="SIGKILL"):
        torchrun(train_until_killed, 2, folder=str(killed), moment=moment)
    checkpoints = DataLayout(killed).job(JOB).checkpoints
    reached = checkpoint.complete(checkpoints)[-1].step
    assert reached in ({3} if moment == "save" else {3, 6})
    assert list(checkpoints.glob(".unfinished*")) or moment == "step"
    runs = torchrun(take_up, 2, killed=str(killed), whole=str(whole))[0]
    assert not list(checkpoints.glob(".unfinished*"))
    assert runs["rest"]["steps"] == list(range(reached + 1, STEPS + 1))
    for series in ("loss", "grad_norm"):
        assert runs["rest"][series] == runs["whole"][series][reached:]
    left, right = (load_file(DataLayout(each).job(JOB).artifacts / "model.safetensors") for each in (killed, whole))
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, and which pipeline rank holds each stage (rank i stage i when absent)."""

    parallel: dict[str, int]
    owners: tuple[int, ...] | None = None


LAYOUTS = {
    "fsdp4": Layout({"dp_shard": 4}),
    "hsdp": Layout({"dp_replicate": 2, "dp_shard": 2}),
    "tp2 fsdp2": Layout({"tp": 2, "dp_shard": 2}),
    "pp2 tp2": Layout({"pp": 2, "tp": 2}),
    "pp4": Layout({"pp": 4}),
    "pp2 looped, fsdp2": Layout({"pp": 2, "dp_shard": 2}, owners=(0, 1, 0, 1)),
    "pp2 V, fsdp2": Layout({"pp": 2, "dp_shard": 2}, owners=(0, 1, 1, 0)),
}
MODEL = TransformerConfig(vocab_size=24, dim=24, layers=5, heads=4, kv_heads=2, ffn_dim=20, max_sequence=8)


def sharded(layout: Layout, seed: int) -> tuple[list[nn.Module], meshes.Mesh]:
    """This rank's stages."""
    mesh = meshes.build(ParallelSpec(**layout.parallel), "cpu")
    owners = layout.owners or tuple(range(mesh.pp.size))
    parts = [Part(stage, len(owners)) for stage, owner in enumerate(owners) if owner == mesh.pp.rank]
    stages = [build(MODEL, mesh, seed=seed, part=part) for part in parts]
    if mesh.dp.size > 1:
        for stage in stages:
            apply_fsdp(stage, mesh, Precision(), reshard=True)
    return stages, mesh


def take_over(folder: str) -> list[str]:
    """On four ranks: every layout loads what every other one saved. Returns the pairs that went wrong."""
    distributed.start("cpu")
    models = {name: sharded(layout, seed=index) for index, (name, layout) in enumerate(LAYOUTS.items())}
    whole: dict[str, dict[str, Tensor]] = {}
    for name, (stages, mesh) in models.items():
        checkpoint.save(Path(folder, name), 1, model_tensors(stages), {})
        whole[name] = gather(stages, mesh)
    wrong = []
    for writer, reader in permutations(LAYOUTS, 2):
        stages, mesh = models[reader]
        checkpoint.load(Path(folder, writer, "step_1"), model_tensors(stages))
        found, expected = gather(stages, mesh), whole[writer]
        if found.keys() != expected.keys() or any(not torch.equal(found[name], expected[name]) for name in found):
            wrong.append(f"{writer} -> {reader}")
    return wrong


@pytest.mark.slow
@pytest.mark.distributed
def test_every_layout_takes_over_from_every_other(tmp_path: Path, torchrun: Torchrun) -> None:
    assert torchrun(take_over, 4, folder=str(tmp_path))[0] == []
    for index, name in enumerate(LAYOUTS):
        expected = dict(build(MODEL, seed=index).named_parameters())
        held = checkpoint.load_whole(tmp_path / name / "step_1", "model.")
        assert held.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[parameter]) for parameter, tensor in held.items())
