"""Programs that people post about: moving averages, tied weights, caches, turns of training and evaluation;
each done right, and some of them also with the mistake.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.compile_corpus.modules import LENGTH, ROWS, WORDS, D
from benchmarks.compile_corpus.programs import LIFETIME, NUMBERS, Entry, Mlp, State, descends, squares
from service.compilation.program import Step

HELD = "pytorch/pytorch#100927: a result held over a replay becomes the next"
UNCACHED = "Dynamo's own warning: it ignores the wrapper of lru_cache and traces the function"


def averages_weights(state: State) -> Iterator[Step]:
    """Let an average of the weights follow, all of them in one call."""
    weights = list(state["net"].parameters())
    average = [each.detach().clone() for each in weights]
    for step in descends(ROWS)(state):
        torch._foreach_lerp_(average, [each.detach() for each in weights], 0.1)
        yield Step(step.losses, {"average": average[0].clone()})


def keeps_norms(state: State) -> Iterator[Step]:
    """Keep the norms of the last gradients, which eager code has computed, in a list."""
    norms: list[Tensor] = []
    while True:
        state.begin_step()
        loss = squares(state, state.call(*ROWS(state)))
        loss.backward()
        norms = [*norms[-3:], nn.utils.clip_grad_norm_(state["net"].parameters(), 1.0)]
        state.optimizer.step()
        state.step += 1
        yield Step({"loss": loss.detach()}, {"norms": torch.stack(norms).mean()})


class Tied(nn.Module):
    """Reads and writes words with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, D), nn.Linear(D, D)
        self.out = nn.Linear(D, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.words(tokens))))


def predicts(state: State) -> Iterator[Step]:
    for state.step in range(10**9):
        state.begin_step()
        tokens = state.whole(state.step % 3, WORDS, 4, LENGTH + 1)
        loss = functional.cross_entropy(state.call(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        yield state.descend(loss)


def looks_in_turns(state: State) -> Iterator[Step]:
    """Look after each step of training at the module's output in inference mode."""
    for state.step in range(10**9):
        state["net"].train()
        state.begin_step()
        loss = squares(state, state.call(state.normal(state.step % 3, 8, D)))
        loss.backward()
        state.optimizer.step()
        state["net"].eval()
        state.mark()
        with torch.inference_mode():
            seen = state.call(state.normal(4, 8, D)).mean(0).clone()
        yield Step({"loss": loss.detach().clone()}, {"seen": seen})


def calls_twice(state: State) -> Iterator[Step]:
    """Call the module twice within one region of autocast, which keeps the weights that it has cast."""
    for state.step in range(10**9):
        state.begin_step()
        with state.precision():
            first = state.call(state.normal(state.step % 3, 8, D))
            second = state.call(state.normal(3 + state.step % 3, 8, D))
        loss = squares(state, first) + squares(state, second)
        yield state.descend(loss)


class Remembering(nn.Module):
    """Attends to the entries that it has written into its buffers, at a given place."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.register_buffer("keys", torch.zeros(4, LENGTH, D))
        self.register_buffer("values", torch.zeros(4, LENGTH, D))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        self.keys.index_copy_(1, place, self.key(x))
        self.values.index_copy_(1, place, self.value(x))
        seen = torch.arange(LENGTH, device=x.device) <= place
        return functional.scaled_dot_product_attention(
            self.query(x), self.keys, self.values, attn_mask=seen[None, None]
        )


def decodes(state: State) -> Iterator[Step]:
    for state.step in range(10**9):
        state.mark()
        place = torch.tensor([state.step % LENGTH], device=state.device)
        yield Step(outputs={"out": state.call(state.normal(state.step % 5, 4, 1, D), place).clone()})


def averages_results(copies: bool) -> Callable[[State], Iterator[Step]]:
    """Return a loop that keeps a moving average of results, begun by a copy of the first, or by that itself."""

    def loop(state: State) -> Iterator[Step]:
        average: Tensor | None = None
        for state.step in range(10**9):
            state.mark()
            output = state.call(state.normal(state.step % 3, 8, D))
            if average is None:
                average = output.clone() if copies else output
            else:
                average.lerp_(output, 0.1)
            yield Step(outputs={"average": average.clone()})

    return loop


def compares_losses(state: State) -> Iterator[Step]:
    """Say whether the module's loss is less than the previous one."""
    last: Tensor | None = None
    for state.step in range(10**9):
        state.begin_step()
        loss = state.call(state.normal(state.step % 3, 8, D))
        gained = torch.zeros_like(loss) if last is None else last.detach() - loss.detach()
        loss.backward()
        state.optimizer.step()
        last = loss
        yield Step({"loss": loss.detach().clone()}, {"gained": gained.clone()})


class Judging(Mlp):
    """Returns its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def teaches_itself(state: State) -> Iterator[Step]:
    """Learn towards its own result of other rows, after which a step is marked."""
    for state.step in range(10**9):
        state.mark()
        with torch.no_grad():
            wanted = state.call(state.normal(state.step % 3, 8, D))
        state.begin_step()
        loss = (state.call(state.normal(3 + state.step % 3, 8, D)) - wanted).square().mean()
        loss.backward()
        state.optimizer.step()
        yield Step({"loss": loss.detach().clone()})


def adds_slopes(state: State) -> Iterator[Step]:
    """Add up slopes of the input, as an attack with momentum does; the last one is the gradient itself."""
    last: Tensor | None = None
    for state.step in range(10**9):
        state.begin_step()
        x = state.normal(state.step % 3, 8, D).requires_grad_()
        loss = squares(state, state.call(x))
        loss.backward()
        assert x.grad is not None
        slope = x.grad if last is None else x.grad + 0.9 * last
        last = x.grad
        state.optimizer.step()
        yield Step({"loss": loss.detach()}, {"slope": slope.clone()})


class Scaled(Mlp):
    """Scales by the first number that it was given: later calls of the function take it from a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

        @cache
        def scale(width: int) -> float:
            return self.scale / width

        self.known = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.known(x.shape[-1])


def rescales(state: State) -> Iterator[Step]:
    for step in descends(ROWS)(state):
        state["net"].scale += 0.5
        yield step


def augments(state: State) -> Iterator[Step]:
    """Scale and shuffle each batch by what Python and NumPy draw."""
    while True:
        state.mark()
        state.optimizer.zero_grad()
        order = torch.from_numpy(np.random.permutation(8)).to(state.device)
        loss = squares(state, state.call(state.normal(1, 8, D)[order] * random.uniform(0.5, 1.5)))
        loss.backward()
        state.optimizer.step()
        yield Step({"loss": loss.detach()})


def reads_lengths(state: State) -> Iterator[Step]:
    """Train on sequences of several lengths, nested in one tensor."""
    while True:
        state.mark()
        state.optimizer.zero_grad()
        parts = [state.normal(state.step + rows, rows, D) for rows in (3, 5)]
        loss = state.call(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().square().mean()
        loss.backward()
        state.optimizer.step()
        state.step += 1
        yield Step({"loss": loss.detach()})


def _sound() -> Iterator[Entry]:
    yield Entry("augments", Mlp, augments)
    yield Entry("reads_lengths", Mlp, reads_lengths)
    yield Entry("averages_weights", Mlp, averages_weights)
    yield Entry("keeps_norms", Mlp, keeps_norms)
    yield Entry("tied_train", Tied, predicts, optimize=partial(torch.optim.Adam, lr=1e-2))
    yield Entry("looks_in_turns", Mlp, looks_in_turns)
    yield Entry("calls_twice_bf16", Mlp, calls_twice, autocast=True)
    yield Entry("decodes", Remembering, decodes, "inference", period=LENGTH)
    yield Entry("averages_results", Mlp, averages_results(copies=True), "inference")


def _wrong() -> Iterator[Entry]:
    held = {
        "averages_in_place": (Mlp, averages_results(copies=False), "inference"),
        "compares_losses": (Judging, compares_losses, "train"),
        "teaches_itself": (Mlp, teaches_itself, "train"),
        "adds_slopes": (Mlp, adds_slopes, "train"),
    }
    for name, (make, loop, phase) in held.items():
        yield Entry(name, make, loop, phase, LIFETIME, HELD, ("cuda",))
    yield Entry(
        "rescales",
        Scaled,
        rescales,
        bug=NUMBERS,
        thread=UNCACHED,
        shows=("cpu", "cuda"),
        versions="2.13, 2.14",
        fast=True,
    )


SOUND: tuple[Entry, ...] = tuple(_sound())
WRONG: tuple[Entry, ...] = tuple(_wrong())
