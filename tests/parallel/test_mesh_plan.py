"""The mesh as arithmetic: positions, groups and refusals, without processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.spec.common import PARALLEL_DIMENSIONS, ParallelSpec
from service.parallel import mesh
from service.parallel.distributed import Launch, LaunchError, local_device, read_launch

DEGREES = st.integers(1, 4)
SPECS = st.fixed_dictionaries(dict.fromkeys(PARALLEL_DIMENSIONS, DEGREES)).map(ParallelSpec.model_validate)
TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@given(SPECS)
def test_every_rank_has_a_position_of_its_own(spec: ParallelSpec) -> None:
    positions = [
        tuple(mesh.coordinates(spec, rank)[name] for name in PARALLEL_DIMENSIONS) for rank in range(spec.world_size)
    ]
    assert positions == sorted(set(positions))


@given(SPECS, st.data())
def test_a_plan_agrees_with_its_coordinates(spec: ParallelSpec, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, spec.world_size - 1))
    planned = mesh.plan(spec, rank)
    assert planned.device_mesh is planned.tp_mesh is planned.shard_mesh is None
    for name in PARALLEL_DIMENSIONS:
        axis = getattr(planned, name)
        assert (axis.size, axis.rank) == (getattr(spec, name), mesh.coordinates(spec, rank)[name])
        assert bool(axis.group) == (axis.size > 1)
    assert planned.pp_ranks[planned.pp.rank] == rank
    assert [mesh.coordinates(spec, peer)["pp"] for peer in planned.pp_ranks] == list(range(spec.pp))
    assert 0 <= planned.dp.rank < planned.dp.size == spec.dp


def test_a_rank_outside_the_mesh_is_refused() -> None:
    with pytest.raises(mesh.MeshError, match="rank 4 is outside pp=2 × dp_replicate=1 × dp_shard=1 × tp=2 = 4 ranks"):
        mesh.plan(ParallelSpec(pp=2, tp=2), 4)


def test_too_few_ranks_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(mesh.MeshError, match=r"tp=2 = 2 ranks were asked for, but 1 were started"):
        mesh.build(ParallelSpec(tp=2), "cpu")


def test_one_process_needs_no_group() -> None:
    alone = mesh.build(ParallelSpec(), "cpu")
    assert (alone.rank, alone.tp.group, alone.pp_ranks) == (0, "", (0,))


def test_the_launcher_is_read() -> None:
    assert read_launch(TORCHRUN) == Launch(3, 1, 4, grouped=True)
    assert read_launch({}) == Launch()
    assert read_launch({"MASTER_PORT": "1"}) == Launch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"MASTER_ADDR": None}, "not MASTER_ADDR"),
        ({"RANK": None}, "not RANK"),
    ],
)
def test_a_broken_launcher_is_named(change: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(LaunchError, match=message):
        read_launch(environment)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(LaunchError, match="device type 'tpu'; expected cpu or cuda"):
        local_device("tpu", Launch())
    with pytest.raises(LaunchError, match=r"LOCAL_RANK=4096 needs a CUDA device of that index; \d+ are visible"):
        local_device("cuda", Launch(local_rank=4096))
