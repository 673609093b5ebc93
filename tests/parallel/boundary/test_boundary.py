"""Steps, calls, pending backwards and results that outlive their step."""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any

import pytest
import torch
from lanes import first_fast
from torch import Tensor, nn

from service.parallel.boundary import (
    CallSite,
    HeldResult,
    LiveResults,
    Origin,
    PendingBackwardError,
    StepBoundary,
    StepWatch,
)
from service.parallel.boundary.holders import holders_of, read_again_of
from service.parallel.boundary.lifetimes import NOWHERE, CallCounter, address_of, held_by_output, located


class Marks:
    """Counts the step marks, in place of the compiler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", self._mark)

    def _mark(self) -> None:
        self.count += 1


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Marks:
    return Marks(monkeypatch)


@pytest.fixture
def model() -> nn.Module:
    module = nn.Linear(4, 3)
    module.compile(backend="eager")
    return module


class Keeper:
    def __init__(self) -> None:
        self.scores: list[Tensor] = []
        self.newest: Tensor | None = None


def test_a_step_is_marked_once_and_only_for_compiled_modules(marks: Marks, model: nn.Module) -> None:
    plain, compiled = StepBoundary({"model": nn.Linear(4, 3)}), StepBoundary({"model": model})
    for boundary in (plain, compiled):
        boundary.step_boundary()
        for _ in range(3):
            boundary.boundary_call(boundary.modules["model"], torch.ones(2, 4)).sum().backward()
        boundary.step_boundary()
    assert marks.count == 2


def test_a_step_cannot_begin_before_the_backward_of_the_last(marks: Marks, model: nn.Module) -> None:
    boundary = StepBoundary({"scorer": model})
    boundary.step_boundary()
    loss = boundary.boundary_call(model, torch.ones(2, 4)).sum()
    with pytest.raises(PendingBackwardError) as caught:
        boundary.step_boundary()
    assert "scorer, called at " in str(caught.value)
    assert caught.value.site.function == "test_a_step_cannot_begin_before_the_backward_of_the_last"
    assert caught.value.origins[0].site.line == caught.value.site.line - 2
    assert marks.count == 1
    loss.backward()
    boundary.step_boundary()
    assert marks.count == 2


@pytest.mark.parametrize("how", ["dropped", "detached", "no gradient"])
def test_a_forward_whose_graph_is_gone_is_not_pending(marks: Marks, model: nn.Module, how: str) -> None:
    boundary = StepBoundary({"model": model})
    boundary.step_boundary()
    with torch.set_grad_enabled(how != "no gradient"):
        output = boundary.boundary_call(model, torch.ones(2, 4))
    output = None if how == "dropped" else output.detach()
    boundary.step_boundary()
    assert marks.count == 2


def test_several_forwards_are_pending_until_their_one_backward(marks: Marks, model: nn.Module) -> None:
    boundary = StepBoundary({"model": model})
    boundary.step_boundary()
    total = sum(boundary.boundary_call(model, torch.ones(2, 4)).sum() for _ in range(3))
    with pytest.raises(PendingBackwardError, match="3 backward"):
        boundary.step_boundary()
    total.backward()
    boundary.step_boundary()


def test_a_result_on_which_no_loss_depends_waits_for_no_backward(marks: Marks, model: nn.Module) -> None:
    """A loop's variable may hold it, such as a dictionary of results, until the next call."""
    boundary = StepBoundary({"both": lambda x: (model(x), model(x))})
    boundary.step_boundary()
    results = boundary.boundary_call(boundary.modules["both"], torch.ones(2, 4))
    results[0].sum().backward()
    boundary.step_boundary()
    assert results[1].grad_fn is not None


def test_calls_are_counted_by_module_mode_gradients_thread_and_shape(marks: Marks, model: nn.Module) -> None:
    boundary = StepBoundary({"model": model})
    boundary.step_boundary()
    for rows in (2, 2, 5):
        boundary.boundary_call(model, torch.ones(rows, 4)).sum().backward()
    model.eval()
    with torch.no_grad():
        other = threading.Thread(target=boundary.boundary_call, args=(model, torch.ones(2, 4)), name="telemetry")
        other.start()
        other.join()
    main = threading.current_thread().name
    counts = {
        (each.module, each.phase, each.grad, each.thread, each.shapes): count
        for each, count in boundary.invocations().items()
    }
    assert counts == {
        ("model", "train", True, main, ((2, 4),)): 2,
        ("model", "train", True, main, ((5, 4),)): 1,
        # Gradient mode belongs to a thread: what this one switched off is on in the other.
        ("model", "inference", True, "telemetry", ((2, 4),)): 1,
    }


def audited(model: nn.Module, use: Any, kept: tuple[str, ...] = ()) -> list[HeldResult]:
    boundary, watches = StepBoundary({"model": model}, kept=kept), [StepWatch() for _ in range(4)]
    found: list[HeldResult] = []
    for number, watch in enumerate(watches):
        if number > 1:
            found += watches[number - 2].outliving()
        boundary.watch_next(watch)
        boundary.step_boundary()
        with torch.no_grad():
            use(boundary.boundary_call(model, torch.ones(2, 4)))
    return found


@pytest.mark.parametrize("view", first_fast(1, [lambda x: x[:1], lambda x: x.detach(), lambda x: x]))
@pytest.mark.parametrize("compiled", [True, False])
def test_a_result_held_over_a_step_is_found_with_its_holder(marks: Marks, compiled: bool, view: Any) -> None:
    model = nn.Linear(4, 3)
    if compiled:
        model.compile(backend="eager")
    keeper = Keeper()
    found = audited(model, lambda output: keeper.scores.append(view(output)))
    assert [held.origin.step for held in found] == [0, 1]
    assert any("Keeper.scores[0]" in name for name in found[0].holders), found[0].holders
    assert found[0].shape == (2, 3)


@pytest.mark.parametrize("use", [lambda keeper, x: None, lambda keeper, x: keeper.scores.append(x.clone())])
def test_results_that_are_consumed_or_copied_are_not_held(marks: Marks, model: nn.Module, use: Any) -> None:
    keeper = Keeper()
    assert not audited(model, lambda output: use(keeper, output))


def test_the_newest_result_may_be_held_until_the_next_replaces_it(marks: Marks, model: nn.Module) -> None:
    keeper = Keeper()
    assert not audited(model, lambda output: setattr(keeper, "newest", output))


def test_results_of_kept_modules_are_copied_once_at_the_boundary(marks: Marks, model: nn.Module) -> None:
    keeper = Keeper()
    assert not audited(model, keeper.scores.append, kept=("model",))
    assert len(keeper.scores) == 4


def test_an_output_in_the_memory_of_an_input_is_nobodys_result(marks: Marks) -> None:
    module = nn.Identity()
    module.compile(backend="eager")
    x, watch = torch.ones(2, 4), StepWatch()
    boundary = StepBoundary({"model": module})
    boundary.watch_next(watch)
    boundary.step_boundary()
    boundary.boundary_call(module, x)
    assert not watch.outliving()


def test_local_variables_are_named_as_holders_and_not_prolonged(marks: Marks, model: nn.Module) -> None:
    boundary, watch = StepBoundary({"model": model}), StepWatch()
    boundary.watch_next(watch)
    boundary.step_boundary()
    with torch.no_grad():
        scores = boundary.boundary_call(model, torch.ones(2, 4))
    (held,) = watch.outliving()
    assert any("scores, a variable of test_local_variables" in name for name in held.holders), held.holders
    del scores
    assert not watch.outliving()


@pytest.mark.slow
def test_looking_for_holders_leaves_the_variables_of_a_program_alone(model: nn.Module) -> None:
    boundary, watch = StepBoundary({"model": model}), StepWatch()
    kept: list[Tensor] = []
    mine = locals()
    boundary.watch_next(watch)
    boundary.step_boundary()
    for _ in range(3):
        with torch.no_grad():
            kept.append(boundary.boundary_call(model, torch.ones(2, 4)))
    assert watch.outliving()
    assert mine["kept"] is kept
    assert len(kept) == 3


@pytest.mark.skipif(
    not hasattr(torch._C, "_set_storage_access_error_msg"), reason="only PyTorch built for CUDA can invalidate a tensor"
)
def test_a_result_that_cuda_graphs_have_invalidated_is_still_named() -> None:
    keeper, outputs = Keeper(), LiveResults()
    keeper.scores.append(torch.ones(2))
    outputs.note(Origin("scorer", CallSite("loop.py", 1, "step"), 0), keeper.scores)
    torch._C._set_storage_access_error_msg(keeper.scores[0], "overwritten by a subsequent run")
    with pytest.raises(RuntimeError, match="overwritten"):
        keeper.scores[0].untyped_storage()
    (held,) = outputs.held(before=1)
    assert any("Keeper.scores[0]" in name for name in held.holders)


def test_unknown_names_are_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="kept names 'other'"):
        StepBoundary({"model": model}, kept=("other",))


def holders_by(keep: Any) -> tuple[str, ...]:
    """Who holds a result, when ``keep`` has kept it."""
    outputs, result = LiveResults(), torch.ones(2)
    outputs.note(Origin("scorer", CallSite("loop.py", 1, "step"), 0), [result])
    kept = keep(result)
    del result
    (held,) = outputs.held(before=1)
    assert kept is not None
    return held.holders


def waiting(result: Tensor) -> Any:
    def steps(mine: Tensor) -> Any:
        yield
        yield mine

    generator = steps(result)
    next(generator)
    return generator


def closing_over(result: Tensor) -> Any:
    seen = [result]
    return lambda: seen


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (waiting, "mine, a variable of steps ("),
        (closing_over, "seen[0], a variable that closing_over.<locals>.<lambda> closes over"),
        pytest.param(
            lambda result: {"last": deque([result])},
            "kept['last'][0], a variable of holders_by (",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda result: functools.partial(print, result), "partial", marks=pytest.mark.slow),
    ],
)
def test_a_holder_is_named_by_the_path_to_it(keep: Any, name: str) -> None:
    assert any(holder.startswith(name) for holder in holders_by(keep)), holders_by(keep)


def test_attributes_come_before_variables_and_modules_go_by_their_names() -> None:
    module, result = nn.Linear(1, 1), torch.ones(2)
    module.hidden = result
    found = holders_of({1: [result]}, {id(module): "lens.first"})
    assert found[1][0] == "lens.first.hidden"
    assert found[1][1].startswith("result, a variable of test_attributes_come_before_variables")


def held_at_the_first_stop(steps: Any) -> tuple[HeldResult, ...]:
    """Return what is held where a loop waits first."""
    outputs = LiveResults()
    generator = steps(lambda result: outputs.note(Origin("scorer", CallSite("loop.py", 1, "step"), 0), [result]))
    next(generator)
    alive = outputs.alive()
    return tuple(held for _, held in held_by_output(alive, located(alive), read_again=True))


def test_a_variable_that_is_not_read_any_more_holds_nothing() -> None:
    def steps(note: Any) -> Any:
        while True:
            result = torch.ones(2)
            note(result)
            print(result.shape)
            yield

    assert held_at_the_first_stop(steps) == ()


def test_what_an_autograd_graph_has_saved_is_held_when_no_variable_is_read_any_more() -> None:
    def steps(note: Any) -> Any:
        while True:
            result = torch.ones(2)
            note(result)
            loss = (torch.ones(2, requires_grad=True) * result).sum()
            yield
            loss.backward()

    (held,) = held_at_the_first_stop(steps)
    assert held.holders == ()


def test_a_list_in_a_variable_that_is_read_now_and_then_holds_its_items() -> None:
    def steps(note: Any) -> Any:
        kept: list[torch.Tensor] = []
        for number in range(1000):
            kept.append(torch.ones(2))
            note(kept[-1])
            yield
            if number == 999:
                print(kept)

    (held,) = held_at_the_first_stop(steps)
    assert held.holders[0].startswith("kept[0], a variable of steps (")


def missed_and_others() -> list[set[int]]:
    """Return how what is found differs from the one that is read again."""
    found = []
    for number in range(2):
        result, other = torch.ones(2), torch.ones(2)
        places = {address_of(result), address_of(other)}
        found.append(read_again_of(places) ^ {address_of(other)})
        if number == 1000:
            print(other)
    return found


def test_what_a_function_that_runs_reads_again_is_known_by_its_memory() -> None:
    assert missed_and_others() == [set(), set()]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.jagged])
def test_a_tensor_without_a_storage_of_its_own_is_counted_and_not_watched(layout: torch.layout) -> None:
    """Such as the edges of a graph, or sequences of several lengths, whose shape is a symbol of their own."""
    tensors = [torch.eye(3).to_sparse() if layout is torch.sparse_coo else nested(layout) for _ in range(2)]
    counter, results = CallCounter(), LiveResults()
    calls = {counter.add("net", len, each) for each in tensors}
    assert [call.shape for call in calls] == ["[3, 3]" if layout is torch.sparse_coo else "[2, -1, 3]"]
    results.note(Origin("net", CallSite("x.py", 1, "f"), 0), tensors)
    assert address_of(tensors[0]) == NOWHERE
    assert results.alive() == ()


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(rows, 3) for rows in (2, 4)], layout=layout)


def test_a_nested_tensor_of_one_storage_is_counted_and_watched() -> None:
    """It has no sizes to ask for."""
    counter, results, result = CallCounter(), LiveResults(), nested(torch.strided)
    assert counter.add("net", len, result).shape == "[-1, -1, -1]"
    results.note(Origin("net", CallSite("x.py", 1, "f"), 0), [result])
    assert len(results.alive()) == 1
