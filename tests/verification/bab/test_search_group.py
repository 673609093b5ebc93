"""One search on several data-parallel ranks: who hands over, and that all end together with what one rank finds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import slow_but_for
from launching import GroupFailureError
from meshes import start_mesh
from nets import mlp
from search_problems import goal_above, model_from, split_activations, split_inputs
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import CROWN
from service.parallel import distributed
from service.parallel.mesh import Axis
from service.verification.bab.activations.domains import DomainTransfer
from service.verification.bab.inputs.boxes import Boxes, BoxPool, BoxTransfer
from service.verification.bab.search_group import (
    SINGLE_RANK,
    GroupState,
    SearchGroup,
    SearchStatus,
)
from service.verification.bab.settings import ActivationSearchSettings, InputSearchSettings, SearchSettings
from service.verification.bab.work_sharing import ENOUGH, plan_moves

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 4000)), min_size=1, max_size=8), st.integers(0, 4000))
def test_ranks_without_enough_for_a_round_get_an_equal_share(ranks: list[tuple[int, int]], most: int) -> None:
    opens, rounds = [each for each, _ in ranks], [each for _, each in ranks]
    left, share = list(opens), -(-sum(opens) // len(opens))
    moves = plan_moves(opens, rounds, most)
    for move in moves:
        assert opens[move.receiver] < ENOUGH * min(share, rounds[move.receiver])
        assert move.count > 0
        left[move.sender] -= move.count
        left[move.receiver] += move.count
        assert left[move.sender] >= share >= left[move.receiver]
    assert sum(left) == sum(opens)
    moved = sum(move.count for move in moves)
    assert moved <= most
    for rank, count in enumerate(opens):
        if count < ENOUGH * min(share, rounds[rank]) and moved < most:
            assert left[rank] == share or max(left) <= share


class OtherRank:
    """Another rank's status, as a collective of two would give it."""

    def __init__(self, status: SearchStatus) -> None:
        self.numbers = torch.tensor([[float(getattr(status, each.name)) for each in fields(SearchStatus)]])

    def gather(self, own: Tensor, dim: int) -> Tensor:
        is_status = own.shape[1] == self.numbers.shape[1]
        return torch.cat([own, self.numbers.to(own) if is_status else torch.zeros_like(own)], dim=dim)


@pytest.mark.parametrize("arrived", [0, 3])
def test_domains_on_their_way_count_as_open(arrived: int) -> None:
    """Three were handed over: a search that forgot those that never arrived would prove what is false."""
    group = SearchGroup(Axis(2, 0, "pair"))
    vars(group)["_ranks"] = OtherRank(SearchStatus(open=0, domains=5, bound=0.5, in_transit=-arrived, seconds=9.5))
    state = group.synchronise(SearchStatus(open=0, domains=7, bound=0.25, in_transit=3, seconds=9.0), None, CPU)
    assert (state.all.open, state.all.domains, state.all.bound, state.all.seconds) == (3 - arrived, 12, 0.25, 9.5)


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
    state = GroupState(SearchStatus(open=4, width=transfers[0].width), None, plan_moves([4, 0], [4, 4], 4))
    collectives, here, zeros = LockStep(), threading.local(), torch.zeros

    def rebalance(rank: int) -> None:
        here.rank = rank
        group = SearchGroup(Axis(2, rank, "pair"))
        vars(group)["_ranks"] = collectives
        for rows in group.rebalance(state, transfers[rank], CPU):
            transfers[rank].receive(rows)

    def no_memory(*size: Any, **options: Any) -> Tensor:
        if here.rank == 1:
            raise MemoryError
        return zeros(*size, **options)

    if short_of_memory == "the receiver":
        monkeypatch.setattr(torch, "zeros", no_memory)
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(rebalance, range(2)))
    monkeypatch.undo()
    assert [pool.size for pool in pools] == ([2, 2] if short_of_memory == "nobody" else [4, 0])
    everything = Boxes.join([pool.take(4) for pool in pools if pool.size])
    assert sorted(everything.box.lower[:, 0].tolist()) == [0.0, 3.0, 6.0, 9.0]


def search(names: list[str]) -> list[dict[str, Any]]:
    """Each search alone and as a group, with how many domains this rank bounded itself."""
    mesh = start_mesh(dp_shard=2)
    search_group, found = SearchGroup(mesh.dp), []
    small = SearchSettings(
        activations=ActivationSearchSettings(largest_batch={"cpu": 16}),
        inputs=InputSearchSettings(largest_batch={"cpu": 16}),
    )
    cases = [
        (split_inputs, BoxTransfer, [3, 16, 16, 1], 3, 1.0, 0.08),
        (split_activations, DomainTransfer, [12, 10, 10, 1], 12, 0.5, 0.5),
    ]
    for split, transfer, widths, features, radius, above in (case for case in cases if case[0].__name__ in names):
        net = mlp(widths, nn.ReLU(), 5, scale=2.0).double()
        for share, limit in ((above, 600.0), (-0.02, 600.0), (above, 0.0)):
            goal = goal_above(net, features, share, radius)
            findings = []
            with counting_domains(transfer) as counted:
                for each in (SINGLE_RANK, search_group):
                    subject = replace(model_from(net, features), search_group=each, settings=small)
                    started = time.monotonic()
                    findings.append(split(subject, goal, CROWN, started + limit, lambda _: None))
            alone, together = findings
            found.append(
                {
                    "case": f"{split.__name__} {share} in {limit} s",
                    "alone": alone.verdict.value,
                    "together": together.verdict.value,
                    "domains": together.domains,
                    "alone domains": alone.domains,
                    "bound": together.bound,
                    "counterexample": together.counterexample,
                    **counted,
                }
            )
    distributed.stop()
    return found


@contextmanager
def counting_domains(transfer: Any) -> Iterator[dict[str, int]]:
    """Count the domains that searches receive, and those that this rank bounds itself."""
    counted = {"received": 0, "own": 0}
    receive, synchronise = transfer.receive, SearchGroup.synchronise

    def count_received(self: Any, rows: Any) -> None:
        counted["received"] += len(rows)
        receive(self, rows)

    def count_own(self: Any, status: Any, *others: Any) -> Any:
        counted["own"] = status.domains
        return synchronise(self, status, *others)

    with patch.object(transfer, "receive", count_received), patch.object(SearchGroup, "synchronise", count_own):
        yield counted


@pytest.mark.distributed
@pytest.mark.parametrize("names", slow_but_for([["split_inputs"], ["split_activations"]], ["split_inputs"]))
def test_two_ranks_decide_as_one_does(torchrun: Any, names: list[str]) -> None:
    first, second = torchrun(search, 2, names=names)
    for one, other in zip(first, second, strict=True):
        assert {**one, "received": 0, "own": 0} == {**other, "received": 0, "own": 0}, "ranks end with the same finding"
        if one["together"] == "unknown":
            assert one["domains"] == one["alone domains"], "what each rank bounds for itself counts once"
        assert one["together"] == one["alone"] or one["together"] == "unknown"
    assert [each["together"] for each in first] == ["verified", "falsified", "unknown"]
    for each in second:
        if each["together"] == "verified":
            assert each["received"] > 0, "the second rank never had a domain"
            assert each["own"] > 0.3 * each["domains"], "both ranks work"


def dies_in_a_search(folder: str) -> None:
    import os
    from dataclasses import replace
    from unittest.mock import patch

    from search_problems import split_inputs

    group, rounds = SearchGroup(start_mesh(dp_shard=2).dp), 0
    net, synchronise = mlp([3, 16, 16, 1], nn.ReLU(), 5, scale=2.0).double(), SearchGroup.synchronise

    def counted(self: Any, *arguments: Any) -> GroupState:
        nonlocal rounds
        rounds += 1
        if rounds == 3 and group.axis.rank == 1:
            os._exit(3)
        return synchronise(self, *arguments)

    with patch.object(SearchGroup, "synchronise", counted):
        goal = goal_above(net, 3, 0.08, 1.0)
        found = split_inputs(
            replace(model_from(net, 3), search_group=group), goal, CROWN, time.monotonic() + 600, lambda _: None
        )
    (Path(folder) / "verdict").write_text(found.verdict.value)


@pytest.mark.distributed
def test_a_rank_that_dies_in_a_search_leaves_no_verdict(tmp_path: Path, torchrun: Any) -> None:
    with pytest.raises(GroupFailureError, match="exit status"):
        torchrun(dies_in_a_search, 2, timeout_s=60.0, folder=str(tmp_path))
    assert not list(tmp_path.iterdir())


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
