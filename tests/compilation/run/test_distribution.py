"""Random numbers that are others than eager's: compared by what they do over many seeds."""

from __future__ import annotations

from itertools import count
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from ladder_runs import Ascend
from programs import drawing, sound
from programs.parts import program
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend

from service.compilation.program.model import ModelProgram, SampleBatch
from service.compilation.run.assessment import Assessment
from service.compilation.run.built_program import BuiltProgram, build, record_step
from service.compilation.run.distribution import (
    _apart,
    _rows_of,
    _samples,
    _standing_out,
    differs_in_distribution,
    slopes,
)
from service.compilation.run.parity import Comparison
from service.compilation.run.recorded_run import Snapshot
from service.compilation.run.sampling import Key
from service.compilation.rungs import RUNGS, Rung
from service.compilation.selftest import backends
from service.jobs.spec.compile import Tolerance

DECOMPOSED = Rung("decomposed", "aot_eager", decomposes=True)


@pytest.mark.parametrize(("kind", "rung"), [
    (drawing.Attending, RUNGS["aot_eager"]),
    pytest.param(drawing.Stochastic, RUNGS["aot_eager"], marks=pytest.mark.slow),
    pytest.param(drawing.Stochastic, DECOMPOSED, marks=pytest.mark.slow),
])  # fmt: skip
def test_other_draws_of_the_same_distribution_pass(ascend: Ascend, kind: type[nn.Module], rung: Rung) -> None:
    """Where operators are decomposed, and where the program itself goes another way when it is compiled; whatever
    becomes of rounding.
    """
    (result,) = ascend(sound.SoundProgram.of(kind), [rung])
    assert (result.verdict, result.findings) == ("pass", ())
    assert result.observation is not None
    assert "draws other random numbers than eager, of the same distribution over seeds" in result.observation.notes
    assert not any("seeds instead of" in each for each in result.observation.notes)


def test_how_many_seeds_are_tried_depends_on_processor_time_alone_and_fewer_are_told(
    ascend: Ascend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the clock goes on while a step has no processor."""
    monkeypatch.setattr(
        "service.compilation.run.distribution.time", SimpleNamespace(process_time=count(0, 60).__next__)
    )
    (result,) = ascend(sound.SoundProgram.of(drawing.Attending), [RUNGS["aot_eager"]])
    assert result.observation is not None
    told = "distributions were compared over 24 seeds instead of 96: a step takes too long"
    assert told in result.observation.notes


@pytest.mark.parametrize("rung", [DECOMPOSED, pytest.param(RUNGS["aot_eager"], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [pytest.param(drawing.Deeper, marks=pytest.mark.slow), drawing.Remasking, drawing.Chipped]
)
def test_another_distribution_is_a_fault(ascend: Ascend, kind: type[nn.Module], rung: Rung) -> None:
    """Also one in which each tensor has that of eager by itself, as gradients of another mask than the output's, and
    one of a few elements among many.
    """
    (result,) = ascend(sound.SoundProgram.of(kind), [rung])
    assert result.verdict == "fail_parity"


def test_a_dropout_that_the_backward_draws_again_is_a_fault(ascend: Ascend) -> None:
    """As torch does with a small budget for activations: only the slope of the loss shows that the gradient is of
    another mask.
    """
    config: Any = functorch_config
    with config.patch(activation_memory_budget=0.0):
        (result,) = ascend(sound.SoundProgram.of(drawing.Dropped), [RUNGS["aot_eager"]])
    assert result.verdict == "fail_parity"


def test_other_numbers_of_the_same_draws_are_no_other_draws(ascend: Ascend) -> None:
    (result,) = ascend(sound.SoundProgram.of(drawing.Shifted), [RUNGS["aot_eager"]])
    assert result.verdict == "fail_parity"
    assert result.observation is not None
    assert not [note for note in result.observation.notes if "distribution" in note]


@pytest.mark.slow
def test_what_generated_code_draws_by_itself_is_compared_too(ascend: Ascend) -> None:
    """What has the same distribution passes: ``test_dropout_is_compared_draw_by_draw_up_to_generated_code``."""
    (result,) = ascend(sound.SoundProgram.of(drawing.Deeper), [RUNGS["inductor"]])
    assert result.verdict == "fail_parity"
    assert any(each.message.endswith("is another than in eager, over many seeds") for each in result.findings)


@pytest.mark.parametrize("raises", [False, True])
def test_where_a_program_begins_the_loss_changes_along_its_gradients_by_what_they_say(raises: bool) -> None:
    """Nothing is said where it would have to be compiled anew for that."""
    built = build(sound.SoundProgram(sound.checkpointed), "train")

    def record(again: BuiltProgram, start: Snapshot, seed: int) -> dict[Key, Tensor]:
        if raises:
            raise RuntimeError("planted: needs to be compiled")
        start.restore(again)
        return record_step(again, seed).tensors

    found = slopes(built, Snapshot.of(built), range(3), record, float)
    assert found is None if raises else torch.allclose(found, torch.ones(3, 1).double(), atol=0.05)


def refuses_eagers_draws(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Compile, as CUDA graphs do with checkpoints in attention, only what draws by itself."""
    config: Any = inductor_config
    if config.fallback_random:
        raise RuntimeError("planted: the state of a generator is no part of the pool")
    return lookup_backend("aot_eager")(graph, inputs)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [pytest.param(drawing.Stochastic, "pass", marks=pytest.mark.slow), (drawing.Remasking, "fail_parity")],
)
def test_code_that_raises_only_where_it_is_to_draw_what_eager_draws_is_compared_by_distribution(
    ascend: Ascend, kind: type[nn.Module], verdict: str
) -> None:
    rung = Rung("inductor", refuses_eagers_draws, generates_code=True, decomposes=True)
    (result,) = ascend(sound.SoundProgram.of(kind), [rung])
    assert result.verdict == verdict
    notes = result.observation.notes if result.observation else ()
    assert any(note.startswith("with fallback_random, which no job has, it ends with") for note in notes)


@pytest.mark.slow
def test_an_error_with_any_draws_stays_one(ascend: Ascend) -> None:
    rung = Rung("inductor", backends.crashes, generates_code=True, decomposes=True)
    (result,) = ascend(sound.SoundProgram.of(drawing.Stochastic), [rung])
    assert result.verdict == "fail_error"


def samples(seed: int, factor: float = 1.0, shift: float = 0.0) -> dict[tuple[str, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {("output", "y"): torch.randn(64, 8, generator=generator, dtype=torch.float64) * factor + shift}


@pytest.mark.parametrize(
    ("factor", "shift", "what"),
    [(1.0, 0.0, ""), (1.0, 0.5, "the mean of output y"), (1.6, 0.0, "the variance of output y")],
)
def test_means_and_variances_that_stand_out_are_named(factor: float, shift: float, what: str) -> None:
    for seed in range(4):
        assert _standing_out(samples(seed), samples(100 + seed, factor, shift), Tolerance().absolute) == what


@pytest.mark.parametrize(("permitted", "what"), [(1e-4, "the mean of some elements of output y"), (1e-2, "")])
def test_one_element_that_no_seed_changes_is_named_if_it_is_further_off_than_it_may_be(
    permitted: float, what: str
) -> None:
    eager, compiled = samples(1), samples(2)
    eager["output", "y"][:, 3], compiled["output", "y"][:, 3] = 1.0, 1.005
    assert _standing_out(eager, compiled, Tolerance().absolute, {("output", "y"): permitted}) == what


@pytest.mark.parametrize("kinds", [{}, {("output", "masked"): torch.full((64, 8), -torch.inf, dtype=torch.float64)}])
def test_what_is_not_finite_hides_nothing(kinds: dict[Key, Tensor]) -> None:
    """Such as masked scores, in eager too; a mean over NaN would stand out nowhere."""
    eager = samples(1) | kinds
    assert not _apart([eager, samples(2) | kinds], Tolerance())
    assert _apart([eager, samples(2, 1.6) | kinds], Tolerance()) == "the variance of output y"


def with_rates(seed: int, rates: dict[float, float]) -> dict[Key, Tensor]:
    """Return samples with each of these values at random, so often in each element."""
    found = samples(seed)
    for number, (value, rate) in enumerate(rates.items()):
        drawn = torch.rand(found["output", "y"].shape, generator=torch.Generator().manual_seed(1000 * seed + number))
        found["output", "y"][drawn < rate] = value
    return found


def test_what_is_not_finite_as_often_on_both_sides_passes() -> None:
    """However rare: an element in which only one side has any is no fault."""
    for seed, rate in enumerate((0.001, 0.01, 0.1)):
        rates = {torch.nan: rate, torch.inf: rate}
        assert not _apart([with_rates(seed, rates), with_rates(100 + seed, rates)], Tolerance())


@pytest.mark.parametrize(("eager", "compiled", "what"), [
    ({torch.inf: 1.0}, {-torch.inf: 1.0}, "+inf"),
    ({torch.nan: 1.0}, {torch.inf: 1.0}, "NaN"),
    ({torch.nan: 0.1}, {torch.nan: 0.4}, "NaN"),
    ({torch.inf: 0.2}, {-torch.inf: 0.2}, "+inf"),
])  # fmt: skip
def test_what_is_not_finite_otherwise_is_named(
    eager: dict[float, float], compiled: dict[float, float], what: str
) -> None:
    found = _apart([with_rates(1, eager), with_rates(2, compiled)], Tolerance())
    assert found == f"the rate of {what} of output y"


@pytest.mark.parametrize(("few", "what"), [(5, ""), (9, "the rate of NaN of output y")])
def test_a_few_samples_on_one_side_alone_are_named(few: int, what: str) -> None:
    """Among other statistics they do not stand out."""
    compiled = samples(2)
    compiled["output", "y"][:few] = torch.nan
    assert _apart([samples(1), compiled], Tolerance()) == what


def test_results_whose_size_the_seed_changes_are_compared_by_size_and_moments() -> None:
    rows = _rows_of([torch.tensor([1.0, 3.0]), torch.tensor([2.0])])
    assert rows.tolist() == [[2, 2, 5], [1, 2, 4]]
    wide = {("output", "y"): samples(2)["output", "y"].repeat(1, 2)}
    assert _apart([samples(1), samples(2) | wide], Tolerance()) == "the size of output y"


WRONG = Comparison("output", "y", 0, 9.0, 1.0)
RUNNING_ON = [Comparison("trajectory", "loss", 2, 9.0, 1.0), Comparison("loss (running on)", "loss", 3, 9.0, 1.0)]


@pytest.mark.parametrize(
    ("wrong", "excused"),
    [
        ([WRONG], True),
        ([WRONG, Comparison("buffer", "mean", 1, 9.0, 1.0)], True),
        ([Comparison("buffer", "mean", 1, 9.0, 1.0)], False),  # all that it comes from is right
        (
            [Comparison("buffer (whole)", "mean", 1, 9.0, 1.0), Comparison("input", "x", 1, 9.0, 1.0), *RUNNING_ON],
            False,
        ),
        (RUNNING_ON, True),
        ([WRONG, Comparison("output", "z", 0, inf, inf, note="shape (3,) instead of (5,)", is_unlike=True)], False),
    ],
)
def test_only_what_draws_may_change_is_excused(
    monkeypatch: pytest.MonkeyPatch, wrong: list[Comparison], excused: bool
) -> None:
    monkeypatch.setattr(Assessment, "_differing_draws", lambda *_: "")
    monkeypatch.setattr("service.compilation.run.assessment.furthest_off", lambda *_: {})
    case, eager = SimpleNamespace(rung=SimpleNamespace(decomposes=True)), SimpleNamespace(random=True)
    nothing: Any = None
    given: Any = nothing, case, SimpleNamespace(eager=eager, iterations=2), SimpleNamespace(agree=float)
    assessment = Assessment(*given, comparisons=wrong)
    assessment._excuse_draws(nothing, nothing)
    assert assessment.redrawn is excused
    assert all(each.passed for each in assessment.comparisons) is excused


def test_whole_numbers_that_no_seed_changes_are_compared_exactly() -> None:
    """In units of their size, the distance of these would be less than rounding."""
    eager, same, other = (samples(seed) | {("output", "n"): torch.full((64, 1), value)} for seed, value in (
        (1, 100_000), (2, 100_000), (3, 100_001)))  # fmt: skip
    assert not _apart([eager, same], Tolerance())
    assert _apart([eager, other], Tolerance()) == "the value of output n"


def test_a_rank_without_anything_to_compare_agrees_with_the_others_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a frozen stage, that has neither loss nor gradients: the others wait for it."""
    asked: list[float] = []
    monkeypatch.setattr("service.compilation.run.distribution._samples", lambda *_: [{}])
    built = build(sound.SoundProgram(sound.bare), "inference")
    baseline: Any = SimpleNamespace(eager=SimpleNamespace(starts=()), oracles=(), iterations=0)
    found = differs_in_distribution(built, baseline, Tolerance(), lambda own: asked.append(own) or 0.0)
    assert (found, asked) == (("", 96), [0.0, 0.0])


@pytest.mark.parametrize(("sizes", "period"), [((4, 4), 1), ((5, 4), 2), ((5, 4, 5), 3), ((5, 4, 5, 5, 4, 5), 3)])
def test_as_many_batches_as_a_period_has_steps_have_every_shape_wherever_they_begin(
    sizes: tuple[int, ...], period: int
) -> None:
    assert program(nn.Module, sizes=sizes).period == period


def test_every_step_of_a_period_is_compared() -> None:
    """A batch of another size has code of its own."""
    batches = tuple(SampleBatch((torch.ones(rows, 6),), torch.zeros(rows).long()) for rows in (5, 4))
    built = build(ModelProgram(lambda dtype: drawing.Stochastic().to(dtype), batches), "inference")
    nothing: Any = SimpleNamespace(eager=SimpleNamespace(starts=()))
    found = [of_step["output", "output"].shape for of_step in _samples(built, nothing, 0, float)]
    assert [tuple(shape) for shape in found] == [(96, 15), (96, 12)]
