"""How many processes climb: what cores and memory allow."""

from __future__ import annotations

from service.compilation.plans import SMALL, choose_plan, plans
from service.compilation.rungs import LADDER
from service.jobs.spec.compile import Phase

PHASES: tuple[Phase, Phase] = ("train", "inference")


def test_no_more_processes_climb_than_there_are_two_cores_for_each() -> None:
    by_cores = {cores: [len(plan) for plan in plans(LADDER, PHASES, cores)] for cores in (1, 3, 4, 8, 12, 64)}
    more = [6, 6, 4, 3, 2, 2, 1]
    assert by_cores == {1: [1], 3: [1], 4: more[4:], 8: more[2:], 12: more, 64: more}


def test_rungs_are_dealt_so_that_no_process_has_much_more_to_do() -> None:
    dealt, halves, whole = (
        [[case.rung.name for case in lane] for lane in plan] for plan in plans(LADDER, ["train"], 64)
    )
    assert dealt == [["eager", "aot_eager_decomp_partition"], ["aot_eager", "inductor"], ["reduce-overhead"]]
    assert halves == [["eager", "aot_eager", "aot_eager_decomp_partition"], ["inductor", "reduce-overhead"]]
    assert whole == [[rung.name for rung in LADDER]]


def test_processes_of_inference_then_take_rungs_of_training_that_would_end_later() -> None:
    helping, without = plans(LADDER, PHASES, 64)[:2]
    assert [[f"{case.phase[0]} {case.rung.name}" for case in lane] for lane in helping] == [
        ["t eager"],
        ["t inductor"],
        ["t reduce-overhead"],
        ["i eager", "i aot_eager_decomp_partition", "t aot_eager"],
        ["i aot_eager", "i inductor"],
        ["i reduce-overhead", "t aot_eager_decomp_partition"],
    ]
    assert all(len({case.phase for case in lane}) == 1 for lane in without)
    for plan in (helping, without):
        assert {case for lane in plan for case in lane} == set(plans(LADDER, PHASES, 1)[0][0])


def test_a_large_program_is_climbed_by_as_many_as_have_room() -> None:
    planned, size = plans(LADDER, PHASES, 64), SMALL + 1
    assert choose_plan(planned, SMALL, room=0) == 0
    rooms = [65 * size, 51 * size, 51 * size - 1, 41 * size, 29 * size, 24 * size, 17 * size, 0]
    chosen = [planned[choose_plan(planned, size, room)] for room in rooms]
    assert [len(plan) for plan in chosen] == [6, 6, 4, 4, 3, 2, 2, 1]
