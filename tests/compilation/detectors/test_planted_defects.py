"""Every planted defect is found and named; what only looks like one is not."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import programs
import pytest
import torch
import torch._dynamo
from ladder_runs import Ascend
from lanes import first_fast
from planted import messages, planted, seen, verdicts
from programs import breaks, clean, empty, peculiar, restless, unequal
from programs.parts import Perceptron
from torch._dynamo.backends.common import aot_autograd

from service.compilation.detectors import judge
from service.compilation.program.model import LEARNING_RATE, SampleBatch
from service.compilation.program.pipeline import PipelineProgram
from service.compilation.run.built_program import build
from service.compilation.run.recorded_run import record_run, state_of
from service.compilation.rungs import LADDER, RUNGS, Rung
from service.compilation.selftest import backends
from service.jobs.spec.common import ParallelSpec
from service.parallel import mesh
from service.parallel.pipeline.transport import connect
from service.schedules import generator

INDUCTOR = RUNGS["inductor"]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "program",
    [
        clean.PERCEPTRON,
        *(pytest.param(each, marks=SLOW) for each in (clean.NORMALISED, clean.LOOKING, clean.MANY_SHAPES)),
    ],
)
def test_clean_programs_pass_both_phases_without_a_finding(ascend: Ascend, program: object) -> None:
    results = ascend(program, phases=("train", "inference"))
    assert verdicts(results) == ["pass"] * 4
    assert all(seen(result).evidence.fullgraph and not result.findings for result in results)


def test_a_new_shape_is_a_recompile_with_its_guard_and_not_a_defect(ascend: Ascend) -> None:
    (result,) = ascend(clean.MANY_SHAPES, rungs=LADDER[:1])
    assert result.verdict == "pass"
    (recompile,) = seen(result).evidence.recompiles
    assert "size mismatch at index 0. expected 8, actual 5" in recompile.guard
    assert recompile.iteration == 1


@pytest.mark.parametrize(
    ("program", "mark", "reason"),
    first_fast(
        2,
        [
            (breaks.SIDE_EFFECT, "side effect", "builtin"),
            (breaks.BRANCH, "branch", "data-dependent branch"),
            (breaks.HOOK, "hook", "builtin"),
        ],
    ),
)
def test_graph_breaks_are_named_by_reason_and_line(ascend: Ascend, program: object, mark: str, reason: str) -> None:
    (result,) = ascend(program, rungs=LADDER[:1])
    evidence = seen(result).evidence
    assert result.verdict == "pass"
    assert not evidence.fullgraph
    assert evidence.graphs == 2 or (mark == "hook" and evidence.graphs)  # where it resumes differs between versions
    (found,) = evidence.graph_breaks
    assert (found.file, found.line) == (breaks.__file__, breaks.line_of(mark))
    assert found.function == ("_tell" if mark == "hook" else "forward")
    assert reason in found.reason
    (demanded,) = judge(replace(seen(result), must_be_whole=True))
    assert demanded.verdict == "fail_break"
    assert demanded.message.startswith(
        f"fullgraph: the graph breaks at {found.file}:{found.line} in {found.function}: "
    )


@pytest.mark.slow
def test_a_shape_that_changes_every_step_hits_the_recompile_limit(ascend: Ascend) -> None:
    first, second = ascend(restless.SHAPE_STORM, steps=10)  # the limit is eight
    assert first.verdict == "vacuous"
    assert "recompile limit was hit" in messages(first)
    assert "len(self.past)" in messages(first)
    assert len(seen(first).evidence.recompiles) >= 3
    assert second.verdict == "not_reached"
    assert second.observation is None


def test_compiling_after_warm_up_is_unstable_and_names_the_guard(ascend: Ascend) -> None:
    (result,) = ascend(restless.LATE_CHANGE, rungs=LADDER[:1], steps=6)
    assert verdicts([result]) == ["unstable"]
    assert "self.mode == 'early'" in messages(result)
    assert seen(result).evidence.late == (3,)


def test_wrong_gradients_fail_parity_where_the_loss_is_right_at_first(ascend: Ascend) -> None:
    (result,) = ascend(clean.PERCEPTRON, rungs=[planted(backends.wrong_gradients)])
    assert result.verdict == "fail_parity"
    assert "gradient first.weight, iteration 0" in messages(result)
    assert "from float64 as eager" in messages(result)
    assert "loss loss, iteration 0" not in messages(result)


def test_a_module_whose_compiled_gradient_differs_fails_the_first_rung_that_compiles_it(ascend: Ascend) -> None:
    first, second = ascend(unequal.WRONG_GRADIENT)
    assert verdicts([first, second]) == ["fail_parity", "not_reached"]
    assert "gradient first." in messages(first)
    assert "iteration 0" in messages(first)
    assert "loss loss, iteration 0" not in messages(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "verdict"), [(unequal.NOISY, "pass"), (unequal.NOISY_WRONG_GRADIENT, "fail_parity")]
)
def test_other_draws_in_float64_permit_nothing(ascend: Ascend, program: object, verdict: str) -> None:
    (result,) = ascend(program, rungs=LADDER[:1])
    assert result.verdict == verdict
    assert seen(result).truth_note == "float64 draws other random numbers"


@pytest.mark.slow
def test_draws_that_float64_shares_leave_it_the_judge(ascend: Ascend) -> None:
    (result,) = ascend(peculiar.DROPOUT, rungs=LADDER[:1])
    assert (result.verdict, seen(result).truth_note) == ("pass", "")


def test_every_output_is_compared_however_it_is_wrapped(ascend: Ascend) -> None:
    (result,) = ascend(unequal.WRONG_ASIDE, rungs=LADDER[:1])
    assert result.verdict == "fail_parity"
    assert messages(result).startswith("output output.1.values, iteration 0: off by")


def test_wrong_outputs_fail_parity_in_inference(ascend: Ascend) -> None:
    (result,) = ascend(clean.PERCEPTRON, rungs=[planted(backends.wrong_outputs)], phases=("inference",))
    assert result.verdict == "fail_parity"
    assert "output output, iteration 0: off by" in messages(result)


def test_gradients_are_compared_where_no_earlier_difference_is_magnified(ascend: Ascend) -> None:
    """A compiler that rounds once more: after eleven free steps parameters are a thousand times further off."""
    rung = planted(aot_autograd(fw_compiler=backends._as_is, bw_compiler=backends._altering(_one_rounding)))
    program = peculiar.CHAOS
    (result,) = ascend(program, rungs=[rung], steps=11)
    assert result.verdict == "pass", result.findings
    worst = {each.kind: each for each in seen(result).comparisons}
    assert worst["gradient"].max_abs * LEARNING_RATE < 1e-6
    assert worst["parameter"].max_abs < 1e-6
    assert worst["trajectory"].iteration == 11
    free, compiled = build(program, "train"), build(program, "train", rung)
    for built in (free, compiled):
        record_run(built, 11)
    left, other = (state_of(built)["parameter", "w"] for built in (free, compiled))
    assert (left - other).abs().max() > 1e-4
    torch._dynamo.reset()


def test_code_that_never_sees_an_update_fails_from_the_second_state_on(ascend: Ascend) -> None:
    """The batch repeats: what is computed from the first state is then the value of the iteration before."""
    (result,) = ascend(clean.PERCEPTRON, rungs=[Rung("planted", _keeps_parameters, compiles_backward=False)])
    assert result.verdict == "fail_parity"
    assert "loss loss, iteration 1: is the value of iteration 0 (1 − 1), off by" in messages(result)
    assert any(finding.message.startswith("trajectory loss, iteration 4: off by") for finding in result.findings)


def _keeps_parameters(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
    """As code would into which they were built as constants."""
    kept: dict[int, torch.Tensor] = {}

    def as_at_first(index: int, value: Any) -> Any:
        if not isinstance(value, torch.nn.Parameter):
            return value
        return value + (kept.setdefault(index, value.detach().clone()) - value).detach()

    return lambda *values: graph(*(as_at_first(index, value) for index, value in enumerate(values)))


def _one_rounding(value: Any) -> Any:
    return value * (1 + 2**-23) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.slow
def test_eager_runs_that_never_agree_prove_nothing(ascend: Ascend) -> None:
    (result,) = ascend(peculiar.never_alike(), rungs=LADDER[:1])
    assert result.verdict == "vacuous"
    assert "errors of that size could not be seen" in messages(result)
    assert "loss loss, iteration 0: two eager runs differ by 16.0%" in messages(result)
    assert any("two eager runs differ, by up to" in note for note in seen(result).notes)


def test_agreement_on_nothing_is_vacuous(ascend: Ascend) -> None:
    (result,) = ascend(empty.NOT_A_NUMBER, rungs=LADDER[:1], phases=("inference",))
    assert result.verdict == "vacuous"
    assert messages(result) == "no loss, output or gradient with a finite number in it was compared with eager's"


def test_training_is_vacuous_where_gradients_agree_on_nothing(ascend: Ascend) -> None:
    train, inference = ascend(empty.NO_SLOPE, rungs=LADDER[:1], phases=("train", "inference"))
    assert verdicts([train, inference]) == ["vacuous", "pass"]
    assert messages(train) == "no gradient with a finite number in it was compared with eager's"


def test_a_disabled_forward_is_vacuous_and_stops_the_climb(ascend: Ascend) -> None:
    first, second = ascend(empty.DISABLED)
    assert verdicts([first, second]) == ["vacuous", "not_reached"]
    assert "no graph was captured" in messages(first)
    assert "Disabled.forward is marked torch.compiler.disable" in messages(first)
    assert "eager did not pass (vacuous)" in messages(second)


def test_what_keeps_a_whole_forward_from_being_compiled_is_told_with_its_line(ascend: Ascend) -> None:
    (result,) = ascend(empty.BREAKING_IN_A_LOOP, rungs=LADDER[:1])
    line = inspect.getsourcelines(empty.BreakingInALoop.forward)[1] + 3
    assert f"the model ran uncompiled; the graph breaks at {empty.__file__}:{line} in forward: " in messages(result)


def test_training_without_a_compiled_backward_is_vacuous(ascend: Ascend) -> None:
    (result,) = ascend(clean.PERCEPTRON, rungs=[Rung("planted", "eager", compiles_backward=True)])
    assert result.verdict == "vacuous"
    assert "no compiled backward ran" in messages(result)


def test_a_swallowed_compile_error_is_vacuous(ascend: Ascend) -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        (result,) = ascend(clean.PERCEPTRON, rungs=[planted(backends.crashes)])
    assert result.verdict == "vacuous"
    assert "planted compiler crash" in messages(result)
    assert "suppress_errors is on" in messages(result)


def test_a_stance_that_forces_eager_is_vacuous(ascend: Ascend) -> None:
    with torch.compiler.set_stance("force_eager"):
        (result,) = ascend(clean.PERCEPTRON, rungs=LADDER[:1])
    assert result.verdict == "vacuous"
    assert "stance is 'force_eager'" in messages(result)


def test_a_compile_error_fails_the_rung_and_the_rest_is_not_reached(ascend: Ascend) -> None:
    results = ascend(clean.PERCEPTRON, rungs=[planted(backends.crashes), LADDER[1]])
    assert verdicts(results) == ["fail_error", "not_reached"]
    assert "BackendCompilerFailed" in messages(results[0])
    assert "planted" in messages(results[1])


@pytest.mark.slow
def test_an_input_updated_in_place_is_noted_and_passes(ascend: Ascend) -> None:
    results = ascend(peculiar.IN_PLACE, phases=("train", "inference"))
    assert verdicts(results) == ["pass"] * 4
    assert all("updates in place what it is given: input 0" in seen(result).notes for result in results)


@pytest.mark.slow
def test_a_program_that_refuses_float64_is_judged_by_eager(ascend: Ascend) -> None:
    (result,) = ascend(peculiar.SINGLE, rungs=LADDER[:1])
    assert result.verdict == "pass", result.findings
    assert seen(result).truth_note == "the model does not run in float64 (AssertionError)"


@pytest.mark.slow
def test_every_rung_is_climbed(ascend: Ascend) -> None:
    results = ascend(clean.PERCEPTRON, rungs=LADDER, phases=("inference",))
    assert verdicts(results) == ["pass"] * 4 + ["not_applicable"]
    assert [seen(result).evidence.graphs for result in results[:4]] == [1] * 4


@pytest.mark.slow
def test_dropout_is_compared_draw_by_draw_up_to_generated_code(ascend: Ascend) -> None:
    results = ascend(peculiar.DROPOUT, rungs=LADDER)
    assert verdicts(results) == ["pass"] * 4 + ["not_applicable"]
    assert seen(results[3]).case.rung == INDUCTOR
    noted = [any("fallback_random" in note for note in seen(result).notes) for result in results[:4]]
    assert noted == [False, True, True, True]
    assert seen(results[3]).compared > 0


def test_a_program_that_does_not_run_uncompiled_fails_before_anything_is_compiled(ascend: Ascend) -> None:
    program = clean.PERCEPTRON
    broken = replace(program, batches=tuple(SampleBatch((b.inputs[0][:, :-1],), b.targets) for b in program.batches))
    results = ascend(broken)
    assert verdicts(results) == ["fail_error", "not_reached"]
    assert "the uncompiled model does not run" in messages(results[0])


def test_a_program_without_a_loss_is_refused_when_it_is_made() -> None:
    with pytest.raises(TypeError, match=r"loss=None: a program needs a function loss\(outputs, targets\)"):
        replace(clean.PERCEPTRON, loss=None)  # type: ignore[arg-type]
    grid, schedule = mesh.build(ParallelSpec(), "cpu"), generator("1f1b")(1, 1, 2)
    with pytest.raises(TypeError, match=r"loss=None: a pipeline needs a function loss\(output, targets\)"):
        PipelineProgram(
            lambda dtype, part: Perceptron(),
            (),
            None,
            grid,
            schedule,
            connect(grid, (0,)),  # type: ignore[arg-type]
        )


def test_the_table_of_programs_names_those_that_there_are() -> None:
    named = re.findall(r"``(\w+)\.(\w+)``", str(programs.__doc__))
    assert len(named) > 15
    assert all(hasattr(import_module(f"programs.{module}"), name) for module, name in named)
