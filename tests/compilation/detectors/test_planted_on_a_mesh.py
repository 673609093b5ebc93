"""FSDP2 on two ranks: what compiles only a part and what trains nothing is found, and what does both passes."""

from __future__ import annotations

from typing import Any

import pytest
from launching import Torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def climb_all() -> Any:
    """For each program the verdicts and findings of its rungs, and of the rehearsal; backwards that compiled autograd
    captured, and functions of FSDP2 that were traced.
    """
    import torch
    from ladder_runs import quick_plan
    from programs.sharded import Sharded, blocks, scoring, sequential

    from service.compilation.ladder import climb
    from service.compilation.ranks.group import slowest
    from service.compilation.report.rows import rung_row
    from service.compilation.rungs import RUNGS
    from service.parallel import distributed

    device = distributed.start("cpu")
    torch.set_num_threads(1)
    found = {}
    programs = {
        "blocks": Sharded(blocks, device),
        "sequential": Sharded(sequential, device),
        "scoring": Sharded(scoring, device),
        "compiled autograd": Sharded(blocks, device, compiles_autograd=True),
    }
    for name, program in programs.items():
        rungs = [RUNGS["aot_eager"], RUNGS["reduce-overhead"]]
        plan = quick_plan(program, 4, agree=slowest)
        results = list(climb(program, rungs, ["train"], plan))
        found[name] = [[each.verdict, [finding.message for finding in each.findings]] for each in results]
        row = rung_row(results[0])
        found[f"{name}: autograd and hooks"] = [row["autograd_captures"], row["hooks_traced"]]
    distributed.stop()
    return found


@pytest.fixture(scope="module")
def found(torchrun: Torchrun) -> Any:
    first, second = torchrun(climb_all, 2)
    assert first == second
    return first


def test_blocks_pass_and_raise_no_alarm(found: Any) -> None:
    assert [verdict for verdict, _ in found["blocks"]] == ["pass", "not_applicable"]
    assert len(found["blocks"][1][1]) == 1, found["blocks"]
    assert found["blocks: autograd and hooks"] == [0, 0]


def test_a_container_of_torch_is_compiled_with_its_hooks_outside(found: Any) -> None:
    assert [verdict for verdict, _ in found["sequential"]] == ["pass", "not_applicable"], found["sequential"]
    assert found["sequential: autograd and hooks"] == [0, 0]


def test_a_block_that_is_called_past_its_compiled_forward_is_vacuous_and_named(found: Any) -> None:
    verdict, (message,) = found["scoring"][0]
    assert verdict == "vacuous"
    assert message.startswith("model.second was never called compiled: the program calls model.second.score ")


def test_compiled_autograd_that_trains_nothing_is_frozen(found: Any) -> None:
    verdict, messages = found["compiled autograd"][0]
    # The oldest torch that is supported refuses instead, with an error.
    assert verdict in {"frozen", "fail_error"}, messages
    assert found["compiled autograd: autograd and hooks"][0] > 0
    if verdict == "frozen":
        assert any("no gradient where eager has one" in each or "do not move" in each for each in messages), messages
        assert any("left whole by FSDP" in each for each in messages), messages
