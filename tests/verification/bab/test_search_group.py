"""One search on several data-parallel ranks: who hands over, and that all end together with what one rank finds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import slow_but_for
from nets import mlp
from search_problems import goal_above
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import CROWN
from service.parallel.mesh import Axis
from service.verification.bab.inputs.boxes import Boxes, BoxPool, BoxTransfer
from service.verification.bab.search_group import (
    SINGLE_RANK,
    GroupState,
    SearchGroup,
    SearchStatus,
    plan_moves,
)
from service.verification.bab.settings import InputSearchSettings

CPU = torch.device("cpu")
MOST = SINGLE_RANK.most_moved


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=8))
def test_those_without_domains_get_half_of_what_the_most_have(opens: list[int]) -> None:
    left = list(opens)
    for move in plan_moves(opens, MOST):
        assert opens[move.receiver] == 0
        assert 0 < move.count <= min(MOST, left[move.sender] // 2)
        assert left[move.sender] == max(left)
        left[move.sender] -= move.count
        left[move.receiver] += move.count
    assert sum(left) == sum(opens)
    if max(opens) > 1:
        assert (0 in opens) == bool(plan_moves(opens, MOST))


def test_a_group_of_one_rank_waits_for_nobody() -> None:
    state = SINGLE_RANK.synchronise(SearchStatus(3, 4, -1.0), (0.5,), torch.device("cpu"))
    assert (state.all, state.counterexample, state.moves) == (SearchStatus(3, 4, -1.0), (0.5,), ())


def test_boxes_are_handed_over_as_they_were() -> None:
    generator = torch.Generator().manual_seed(0)
    lower = torch.rand(5, 3, generator=generator)
    boxes = Boxes(
        Interval(lower, lower + 1), torch.rand(5, generator=generator) - 1, lower[:, :2] > 0.5, {}, torch.full((5,), -1)
    )
    sender, receiver = (BoxPool(CPU, InputSearchSettings().crowded_entries) for _ in range(2))
    sender.put(boxes)
    transfer = BoxTransfer(sender, 2, 3, torch.float32)
    BoxTransfer(receiver, 2, 3, torch.float32).receive(transfer.give(5, transfer.width))
    assert (sender.size, receiver.size) == (0, 5)
    got = receiver.take(5)
    for name in ("margins", "open"):
        assert torch.equal(getattr(got, name), getattr(boxes, name))
    assert torch.equal(got.box.lower, boxes.box.lower)
    assert torch.equal(got.box.upper, boxes.box.upper)


class LockStep:
    """What the collectives of two threads, one per rank, give: all of them reach each call before any returns."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.parts: list[Any] = []

    def _reduced(self, part: Any, reduction: Callable[[list[Any]], Any]) -> Any:
        self.parts.append(part)
        self.barrier.wait()
        reduced = reduction(self.parts)
        self.barrier.wait()
        self.parts = []
        self.barrier.wait()
        return reduced

    def largest(self, value: int, device: torch.device) -> int:
        return int(self._reduced(value, max))

    def sum(self, part: Tensor) -> Tensor:
        return torch.as_tensor(self._reduced(part, lambda parts: torch.stack(parts).sum(dim=0)))


class NoMemoryToGive(BoxTransfer):
    """A transfer that has no memory for the rows that it takes out."""

    def give(self, count: int, width: int) -> Tensor:
        def fail(boxes: Boxes) -> Tensor:
            assert len(boxes) == count
            raise torch.OutOfMemoryError("out of memory")

        return self.pool.take_as(fail, count)


@pytest.mark.parametrize("short_of_memory", ["nobody", "the sender", "the receiver"])
def test_subproblems_stay_where_memory_does_not_suffice_to_hand_them_over(
    short_of_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    pools = [BoxPool(CPU, InputSearchSettings().crowded_entries) for _ in range(2)]
    pools[0].put(
        Boxes(Interval(lower, lower + 1), -torch.ones(4), torch.ones(4, 2, dtype=torch.bool), {}, torch.full((4,), -1))
    )
    kinds = [NoMemoryToGive if short_of_memory == "the sender" else BoxTransfer, BoxTransfer]
    transfers = [kind(pool, 2, 3, torch.float32) for kind, pool in zip(kinds, pools, strict=True)]
    state = GroupState(SearchStatus(open=4, width=transfers[0].width), None, plan_moves([4, 0], MOST))
    collectives = LockStep()

    def rebalance(rank: int) -> None:
        group = SearchGroup(Axis(2, rank, "pair"))
        vars(group)["_ranks"] = collectives
        for rows in group.rebalance(state, transfers[rank], CPU):
            transfers[rank].receive(rows)

    def no_memory(*_: Any, **__: Any) -> Tensor:
        raise MemoryError

    if short_of_memory == "the receiver":
        monkeypatch.setattr(torch, "zeros", no_memory)
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(rebalance, range(2)))
    monkeypatch.undo()
    assert [pool.size for pool in pools] == ([2, 2] if short_of_memory == "nobody" else [4, 0])
    everything = Boxes.join([pool.take(4) for pool in pools if pool.size])
    assert sorted(everything.box.lower[:, 0].tolist()) == [0.0, 3.0, 6.0, 9.0]


def model_named(module: nn.Module, features: int, search_group: Any) -> Any:
    from service.bounds.network import prepare
    from service.verification.bab.model import ModelUnderVerification
    from service.verification.engine import NetworkEngine

    module = module.double().eval().requires_grad_(False)
    return ModelUnderVerification(
        module, NetworkEngine(prepare(module, (features,))), module, None, torch.float64, search_group
    )


def search(names: list[str]) -> list[dict[str, Any]]:
    """Each search alone and as a group, with how many domains this rank bounded itself."""
    from dataclasses import replace
    from unittest.mock import patch

    import whole_searches as searches

    from service.jobs.spec.common import ParallelSpec
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh
    from service.verification.bab.activations import search as activations
    from service.verification.bab.inputs import search as inputs
    from service.verification.bab.search_group import SearchGroup
    from service.verification.bab.settings import ActivationSearchSettings, SearchSettings

    distributed.start("cpu")
    mesh = build_mesh(ParallelSpec(dp_shard=2), "cpu")
    search_group, found = SearchGroup(mesh.dp), []
    small = SearchSettings(
        activations=ActivationSearchSettings(largest_batch=16), inputs=InputSearchSettings(largest_batch={"cpu": 16})
    )
    cases = [
        (inputs.BoxTransfer, "split_inputs", [3, 16, 16, 1], 3, 1.0, 0.08),
        (activations.DomainTransfer, "split_activations", [12, 10, 10, 1], 12, 0.5, 0.5),
    ]
    for transfer, name, widths, features, radius, above in (case for case in cases if case[1] in names):
        net = mlp(widths, nn.ReLU(), 5, scale=2.0).double()
        for share, limit in ((above, 600.0), (-0.02, 600.0), (above, 0.0)):
            goal = goal_above(net, features, share, radius)
            received = 0

            def receive(self: Any, rows: Any, original: Any = transfer.receive) -> None:
                nonlocal received
                received += len(rows)
                original(self, rows)

            findings = []
            with patch.object(transfer, "receive", receive):
                for each in (SINGLE_RANK, search_group):
                    subject = replace(model_named(net, features, each), settings=small)
                    started = time.monotonic()
                    findings.append(getattr(searches, name)(subject, goal, CROWN, started + limit, lambda _: None))
            alone, together = findings
            found.append(
                {
                    "case": f"{name} {share} in {limit} s",
                    "alone": alone.verdict.value,
                    "together": together.verdict.value,
                    "domains": together.domains,
                    "bound": together.bound,
                    "counterexample": together.counterexample,
                    "received": received,
                }
            )
    distributed.stop()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("names", slow_but_for([["split_inputs"], ["split_activations"]], ["split_inputs"]))
def test_two_ranks_decide_as_one_does(torchrun: Any, names: list[str]) -> None:
    first, second = torchrun(search, 2, names=names)
    for one, other in zip(first, second, strict=True):
        assert {**one, "received": 0} == {**other, "received": 0}, "ranks end with the same finding"
        assert one["together"] == one["alone"] or one["together"] == "unknown"
    assert [each["together"] for each in first] == ["verified", "falsified", "unknown"]
    for each in second:
        if each["together"] == "verified":
            assert each["received"] > 0, "the second rank never had a domain"


def query_job(folder: str, query: str) -> dict[str, Any]:
    import os

    from onnx_jobs import specification
    from verify_jobs import context

    from service.jobs.files import DataLayout
    from service.parallel import distributed
    from service.verification import job

    ranked, report = context(DataLayout(Path(folder)), int(os.environ["RANK"]), 2)
    data = DataLayout(Path(folder))
    distributed.start("cpu")
    spec = specification(data, query, parallel={"dp_shard": 2})  # uploads the files
    torch.distributed.barrier()
    result = job.run(spec, ranked)
    distributed.stop()
    return {"rows": report.bounds, "verdicts": None if result is None else result["verdicts"]}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_job_of_one_query_is_searched_by_all_its_ranks(tmp_path: Path, torchrun: Any) -> None:
    from onnx_jobs import BOX, DECLARED, reach

    least, most = reach()
    query = f"{DECLARED}{BOX}(assert (>= Y_0 {most + 0.1 * (most - least)}))"
    first, second = torchrun(query_job, 2, folder=str(tmp_path), query=query)
    assert first["verdicts"]["verified"] == 1
    assert [row["verdict"] for row in first["rows"]] == ["verified"]
    assert second == {"rows": [], "verdicts": None}
