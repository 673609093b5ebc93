"""How many processes climb: what cores and memory allow."""

from __future__ import annotations

from service.compilation.plans import SMALL, choose_plan, plans
from service.compilation.rungs import LADDER
from service.jobs.spec.compile import Phase

PHASES: tuple[Phase, Phase] = ("train", "inference")


def test_no_more_processes_climb_than_there_are_two_cores_for_each() -> None:
    by_cores = {cores: [len(plan) for plan in plans(LADDER, PHASES, cores)] for cores in (1, 3, 4, 8, 12, 64)}
    assert by_cores == {1: [1], 3: [1], 4: [2, 1], 8: [4, 3, 2, 1], 12: [6, 4, 3, 2, 1], 64: [6, 4, 3, 2, 1]}


def test_rungs_are_dealt_so_that_no_process_has_much_more_to_do() -> None:
    dealt, halves, whole = (
        [[case.rung.name for case in lane] for lane in plan] for plan in plans(LADDER, ["train"], 64)
    )
    assert dealt == [["eager", "aot_eager_decomp_partition"], ["aot_eager", "inductor"], ["reduce-overhead"]]
    assert halves == [["eager", "aot_eager", "aot_eager_decomp_partition"], ["inductor", "reduce-overhead"]]
    assert whole == [[rung.name for rung in LADDER]]


def test_a_large_program_is_climbed_by_as_many_as_have_room() -> None:
    planned, size = plans(LADDER, PHASES, 64), SMALL + 1
    assert choose_plan(planned, SMALL, room=0) == 0
    rooms = [51 * size, 51 * size - 1, 41 * size, 29 * size, 17 * size, 0]
    assert [len(planned[choose_plan(planned, size, room)]) for room in rooms] == [6, 4, 4, 3, 2, 1]
