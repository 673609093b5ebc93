"""A vocabulary that tensor parallelism does not divide: padded on the ranks, and nowhere else to be seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import Torchrun
from layout_groups import of_ranks
from safetensors.torch import load_file
from torch.nn import functional
from training_runs import JOB, TRANSFORMER, train

from service.jobs.files import DataLayout
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import TransformerConfig
from service.models import build, load_into
from service.models.registry import outline
from service.parallel import distributed
from service.parallel import mesh as meshes
from service.parallel.checkpoint import stored
from service.parallel.mesh import Axis, padded
from service.parallel.tensor import local, vocabulary_parallel_cross_entropy
from service.parallel.tensor.placement import global_parameters

VOCABULARY = 257
SPEC: dict[str, Any] = {
    **TRANSFORMER,
    "model": {**TRANSFORMER["model"], "dim": 16, "vocab_size": VOCABULARY},
    # A decay and a limit that both change every step, which padding must have no part in.
    "optimizer": {"lr": 3e-3, "weight_decay": 0.5, "clip_norm": 0.2},
    "batch": {"global": 8, "micro": 2},
    "steps": 3,
    "checkpoint": {"every": 2},
    "export": {"huggingface": "fp32"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel": {"tp": 2}},
    "tp2, tied": {"parallel": {"tp": 2}, "tied": True},
    "tp4": {"parallel": {"tp": 4}},
    "tp4, tied": {"parallel": {"tp": 4}, "tied": True},
    "pp2 tp2, tied": {"parallel": {"pp": 2, "tp": 2}, "tied": True},
    "pp2 tp2 zero_bubble": {"parallel": {"pp": 2, "tp": 2}, "pipeline": {"schedule": "zero_bubble"}},
    "dp_shard2 tp2": {"parallel": {"dp_shard": 2, "tp": 2}},
    "dp_shard2 tp2, tied": {"parallel": {"dp_shard": 2, "tp": 2}, "tied": True},
    "dp_replicate2 tp2": {"parallel": {"dp_replicate": 2, "tp": 2}},
    # A rank's 129 rows over three: the last of them has all of the padding, and one row less.
    "dp_shard4 tp2, tied": {"parallel": {"dp_shard": 4, "tp": 2}, "tied": True, "batch": {"global": 8, "micro": 1}},
}
FAST = ["tp2"]
TAKING_UP = {2: ["tp2", "tp2, tied"], 4: ["tp4", "pp2 tp2, tied", "dp_shard2 tp2"]}
"""By ranks, the layouts that go on with what one process has begun, and the other way round: each axis, tied or not."""
Singles = Callable[[bool], tuple[Path, dict[str, Any]]]
"""Where one process ran, with a tied table or with two, and what it gave."""
TOLERANCE = 1e-10  # float64 throughout: layouts differ by the order of sums only


def run(folder: str | Path, layout: dict[str, Any], **how: Any) -> dict[str, Any]:
    own = {key: value for key, value in layout.items() if key != "tied"}
    model = {**SPEC["model"], "tied_embeddings": layout.get("tied", False)}
    return train(folder, {**SPEC, **own, "model": model}, test_samples=3, state=torch.float64, **how)


def begin(folder: str, names: list[str]) -> dict[str, Any]:
    """On each rank: the first two steps of these layouts, in folders of their own."""
    return {name: run(Path(folder, name), LAYOUTS[name], stop_after=2) for name in names}


def go_on(folder: str, names: list[str]) -> dict[str, Any]:
    """On each rank: what is left of what lies there."""
    return {name: run(Path(folder, name), LAYOUTS[name]) for name in names}


def begin_and_go_on(folder: str, names: list[str]) -> dict[str, Any]:
    first, second = begin(folder, names), go_on(folder, names)
    series = ("loss", "grad_norm", "steps")
    return {name: {**second[name], **{key: first[name][key] + second[name][key] for key in series}} for name in names}


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Singles:
    @cache
    def single(tied: bool) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("single")
        return folder, run(folder, {"tied": tied})

    return single


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, FAST),
        pytest.param(2, ["tp2, tied"], marks=pytest.mark.slow),
        pytest.param(4, of_ranks(LAYOUTS, 4), marks=pytest.mark.slow),
        pytest.param(8, of_ranks(LAYOUTS, 8), marks=pytest.mark.slow),
    ],
)
def test_no_layout_shows_its_padding(
    tmp_path: Path, torchrun: Torchrun, singles: Singles, world: int, names: list[str]
) -> None:
    """Each is stopped after its second step and taken up again."""
    outcomes = torchrun(begin_and_go_on, world, folder=str(tmp_path), names=names)[0]
    for name in names:
        written = stored(DataLayout(tmp_path / name).job(JOB).checkpoints / "step_2")
        rows = {key: tensor.shape[0] for key, tensor in written.items() if "embedding" in key or "head" in key}
        assert len(rows) == (3 if "tied" in name else 6)
        assert set(rows.values()) == {VOCABULARY}
        assert outcomes[name]["steps"] == [1, 2, 3], name
        assert_same(tmp_path / name, outcomes[name], singles("tied" in name))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_padded_ranks_take_up_what_one_process_has_begun(
    tmp_path: Path, torchrun: Torchrun, singles: Singles, world: int
) -> None:
    names = TAKING_UP[world]
    for name in names:
        run(tmp_path / name, {"tied": "tied" in name}, stop_after=2)
    for name, got in torchrun(go_on, world, folder=str(tmp_path), names=names)[0].items():
        assert_same(tmp_path / name, got, singles("tied" in name))


def assert_same(folder: Path, got: dict[str, Any], single: tuple[Path, dict[str, Any]]) -> None:
    """Ask whether a run has the numbers and files of one process, which ran all of the steps."""
    wanted_in, wanted = single
    for series in ("loss", "grad_norm", "eval_loss"):
        assert got[series] == pytest.approx(wanted[series][-len(got[series]) :], rel=TOLERANCE, abs=0), folder.name
    assert got["result"]["parameters"] == wanted["result"]["parameters"], folder.name
    assert_same_files(DataLayout(folder).job(JOB).artifacts, DataLayout(wanted_in).job(JOB).artifacts)


def assert_same_files(found: Path, expected: Path) -> None:
    for file in ("model.safetensors", "huggingface/model.safetensors"):
        ours, theirs = load_file(found / file), load_file(expected / file)
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-9, msg=f"{file}: {name}")
    assert json.loads((found / "huggingface/config.json").read_bytes())["vocab_size"] == VOCABULARY


@pytest.mark.distributed
@pytest.mark.slow
def test_one_process_takes_up_what_padded_ranks_have_begun(
    tmp_path: Path, torchrun: Torchrun, singles: Singles
) -> None:
    names = TAKING_UP[4]
    torchrun(begin, 4, folder=str(tmp_path), names=names)
    for name in names:
        tied = "tied" in name
        assert_same(tmp_path / name, run(tmp_path / name, {"tied": tied}), singles(tied))


@given(length=st.integers(1, 40), size=st.integers(1, 9))
def test_ranks_share_what_does_not_divide(length: int, size: int) -> None:
    axes = [padded(Axis(size, rank), length) for rank in range(size)]
    places = [axis.rank * axis.share + place for axis in axes for place in range(axis.own)]
    assert places == list(range(length))
    assert {axis.share * size >= length > axis.share * size - size for axis in axes} == {True}
    assert axes[0].is_padded == any(axis.own < axis.share for axis in axes)


@pytest.mark.parametrize("tied", [False, True])
def test_an_outline_is_without_padding(tied: bool) -> None:
    config = TransformerConfig(vocab_size=VOCABULARY, dim=8, layers=1, heads=4, tied_embeddings=tied)
    found = outline(config, Axis(2, 1))
    assert found.parameters == outline(config).parameters
    assert found.rows == dict.fromkeys(
        ["embedding.weight"] if tied else ["embedding.weight", "head.weight"], VOCABULARY
    )


def on_few_tokens(folder: str, vocabularies: list[int]) -> dict[str, Any]:
    """On each rank of four: the greatest differences to one process, for so few tokens that some have none."""
    distributed.start("cpu")
    mesh = meshes.build(ParallelSpec(tp=4), "cpu")
    found = {}
    for vocabulary in vocabularies:
        config = TransformerConfig(vocab_size=vocabulary, dim=8, layers=1, heads=4, max_sequence=6)
        whole, divided = (build(config, each, dtype=torch.float64, seed=3) for each in (None, mesh))
        load_into(divided, dict(global_parameters(whole)))
        tokens, targets = torch.randint(vocabulary, (2, 3, 6), generator=torch.Generator().manual_seed(1))
        logits = divided(tokens)
        loss = vocabulary_parallel_cross_entropy(logits, targets, divided.output_axis)
        expected = functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
        for each in (loss, expected):
            each.backward()
        own = divided.output_axis
        differences = [loss - expected]
        for name, parameter in divided.named_parameters():
            gradient, wanted = parameter.grad.full_tensor(), whole.get_parameter(name).grad
            differences.append(gradient[: len(wanted)] - wanted)
            differences.append(gradient[len(wanted) :])
            differences.append(parameter.full_tensor()[len(wanted) :])
        found[str(vocabulary)] = {
            "columns": logits.shape[-1],
            "rows": len(local(divided.embedding.weight)),
            "own": own.own,
            "difference": max(float(each.detach().abs().max()) for each in differences if each.numel()),
        }
    distributed.stop()
    return found


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_without_a_token_take_part(tmp_path: Path, torchrun: Torchrun) -> None:
    ranks = torchrun(on_few_tokens, 4, folder=str(tmp_path), vocabularies=[2, 5, 9, 7])
    assert [found["5"]["columns"] for found in ranks] == [2, 2, 1, 0]
    assert [found["9"]["columns"] for found in ranks] == [3, 3, 3, 0]
    for found in ranks:
        for vocabulary, each in found.items():
            assert each["columns"] == each["own"], vocabulary
            assert each["rows"] == -(-int(vocabulary) // 4), vocabulary
            assert each["difference"] < 1e-12, vocabulary
