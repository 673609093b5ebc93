"""Training and inference as people write them, with common additions to a forward and a backward, done right;
and some of them with an easy mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.compile_corpus.modules import IMAGE, LENGTH, ROWS, SEQUENCE, WORDS, Chain, D, Language
from benchmarks.compile_corpus.programs import LIFETIME, Entry, Mlp, State, descends, infers, squares
from benchmarks.compile_corpus.sound import adversarial, adversaries
from benchmarks.compile_corpus.written_modules import (
    Cells,
    Clamping,
    Counting,
    Ensemble,
    Forces,
    Growing,
    Hooked,
    Losing,
    Noisy,
    Parts,
    Quantised,
    Switching,
)
from service.compilation.program import Step

HELD = "pytorch/pytorch#100927: a result held over a replay becomes the next"


def signs(state: State) -> tuple[Tensor]:
    x = state.normal(1, 8, D)
    return (x.abs() if state.step % 2 else -x.abs(),)


def channels_last(state: State) -> tuple[Tensor]:
    return (IMAGE(state)[0].to(memory_format=torch.channels_last),)


def images() -> nn.Module:
    made = Chain(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 3, stride=2))
    return made.to(memory_format=torch.channels_last)


def follows(state: State) -> Iterator[Step]:
    """Look in each step at the output of a moving average of the module."""
    average = AveragedModel(state["net"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in descends(ROWS)(state):
        average.update_parameters(state["net"])
        with torch.no_grad():
            averaged = average(state.normal(4, 8, D))
        yield Step(step.losses, {"averaged": averaged})


def scales(state: State) -> Iterator[Step]:
    """Train in bf16 with a scaled loss, clipped."""
    scaler = torch.amp.GradScaler(state.device.type, init_scale=2.0**8)
    while True:
        state.begin_step()
        loss = squares(state, state.call(*ROWS(state)))
        scaler.scale(loss).backward()
        scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(state["net"].parameters(), 1.0)
        scaler.step(state.optimizer)
        scaler.update()
        state.step += 1
        yield Step({"loss": loss.detach()})


def hooks(state: State) -> Iterator[Step]:
    """Change gradients by hooks: that of a result, and each parameter's when it is there."""
    while True:
        state.begin_step()
        output = state.call(*ROWS(state))
        output.register_hook(lambda gradient: 0.5 * gradient)
        loss = squares(state, output)
        state.step += 1
        yield state.descend(loss)


def mixes(state: State) -> Iterator[Step]:
    """Train on mixtures of samples, drawn anew in each step."""
    while True:
        state.begin_step()
        x, wanted = state.normal(1, 8, D), state.whole(2, 8, 8)
        other, part = torch.randperm(8).to(state.device), float(torch.rand(()))
        scores = state.call(part * x + (1 - part) * x[other])
        loss = part * functional.cross_entropy(scores, wanted)
        loss = loss + (1 - part) * functional.cross_entropy(scores, wanted[other])
        yield state.descend(loss)


def schedules(state: State) -> Iterator[Step]:
    """Let a scheduler and a running mean of the loss, a plain number, set the rate."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda epoch: 1 / (1 + 0.1 * epoch))
    running = 1.0
    for step in descends(ROWS, clip=1.0)(state):
        running = 0.9 * running + 0.1 * step.losses["loss"].item()
        scheduler.step()
        yield Step(step.losses, {"running": torch.tensor(running), "rate": torch.tensor(scheduler.get_last_lr())})


def searches(state: State) -> Iterator[Step]:
    """Let the optimizer call the forward and backward, as often as it likes."""
    while True:
        state.mark()

        def closure() -> Tensor:
            state.optimizer.zero_grad()
            loss = squares(state, state.call(state.normal(1, 8, D)))
            loss.backward()
            return loss

        yield Step({"loss": state.optimizer.step(closure).detach().clone()})


def queues(state: State) -> Iterator[Step]:
    """Compare with a queue of earlier keys, which another module makes that follows the first."""
    queue, place = functional.normalize(state.normal(9, 16, 8), dim=-1), 0
    while True:
        state.begin_step()
        query = functional.normalize(state.call(*ROWS(state)), dim=-1)
        with torch.no_grad():
            for own, other in zip(state["net"].parameters(), state["slow"].parameters(), strict=True):
                other.data.mul_(0.9).add_(own.data, alpha=0.1)
            key = functional.normalize(state.call(*ROWS(state), module="slow"), dim=-1)
        scores = torch.cat([(query * key).sum(-1, keepdim=True), query @ queue.to(query).t()], 1)
        loss = functional.cross_entropy(scores / 0.2, torch.zeros(8, dtype=torch.int64, device=state.device))
        loss.backward()
        state.optimizer.step()
        queue[place : place + 8] = key
        place, state.step = (place + 8) % 16, state.step + 1
        yield Step({"loss": loss.detach()})


def slow() -> dict[str, nn.Module]:
    return {"net": Mlp(), "slow": Mlp().requires_grad_(False)}


def learns_values(state: State) -> Iterator[Step]:
    """Learn values of actions towards those of a copy that is renewed every third step."""
    for state.step in range(10**9):
        state.begin_step()
        now, then, action = state.normal(1, 8, D), state.normal(2, 8, D), state.whole(3, 8, 8)
        with torch.no_grad():
            wanted = state.normal(4, 8) + 0.9 * state.call(then, module="slow").max(-1).values
        value = state.call(now).gather(1, action[:, None])[:, 0]
        loss = functional.smooth_l1_loss(value, wanted)
        loss.backward()
        state.optimizer.step()
        if state.step % 3 == 2:
            for own, other in zip(state["net"].parameters(), state["slow"].parameters(), strict=True):
                other.data.copy_(own.data)
        yield Step({"loss": loss.detach()})


def rolls_out(keep: str) -> Callable[[State], Iterator[Step]]:
    """Return a loop that acts for some marked steps and learns from all of them: values copied into a buffer, or held
    in a list.
    """

    def loop(state: State) -> Iterator[Step]:
        while True:
            buffer, values = torch.zeros(3, 8, device=state.device, dtype=state.parts.dtype), []
            for time in range(3):
                state.mark()
                with torch.no_grad():
                    value = state.call(state.normal(time, 8, D)).mean(-1, keepdim=True) if keep == "buffer" else None
                    values.append(state.call(state.normal(time, 8, D))[:, 0] if value is None else value[:, 0])
                buffer[time] = values[-1]
            past = buffer if keep == "buffer" else torch.stack(values)
            state.begin_step()
            loss = squares(state, state.call(state.normal(3, 8, D)) - past.mean(0)[:, None])
            yield state.descend(loss)

    return loop


def accumulates_by_turns(state: State) -> Iterator[Step]:
    """Take a micro-batch each time, and step with every second, as with ``no_sync``."""
    for state.step in range(10**9):
        first = state.step % 2 == 0
        if first:
            state.mark()
        with nullcontext():
            loss = squares(state, state.call(state.normal(state.step % 2, 8, D))) / 2
            loss.backward()
        if not first:
            state.optimizer.step()
            state.optimizer.zero_grad()
        yield Step({"loss": loss.detach().clone()})


def sums_losses(rarely: bool) -> Callable[[State], Iterator[Step]]:
    """Return a loop of a module that gives its loss: added up, or kept in a list that is looked at rarely."""

    def loop(state: State) -> Iterator[Step]:
        total, kept = torch.zeros((), device=state.device, dtype=state.parts.dtype), []
        for state.step in range(10**9):
            state.begin_step()
            loss, _ = state.call(state.normal(state.step % 3, 8, D))
            loss.backward()
            state.optimizer.step()
            total += loss.detach()
            if rarely:
                kept.append(loss.detach())
            if rarely and state.step % 1000 == 999:
                total.copy_(torch.stack(kept).mean())
                kept.clear()
            yield Step({"loss": loss.detach().clone()}, {"total": total.clone()})

    return loop


def reads_by_hook(late: bool) -> Callable[[State], Iterator[Step]]:
    """Return a loop that reads a hook's record of an inner layer, in the same step or after the next call."""

    def loop(state: State) -> Iterator[Step]:
        before: Tensor | None = None
        for state.step in range(10**9):
            state.mark()
            output = state.call(state.normal(state.step % 3, 8, D))
            now = state["net"].seen["first"]
            read = now if before is None or not late else before
            before = now
            yield Step(outputs={"out": output.clone(), "inner": read.mean(0).clone()})

    return loop


def grows(copies: bool) -> Callable[[State], Iterator[Step]]:
    """Return a loop that decodes with a cache that grows; the caches of the step before are copied, or given as they
    are.
    """

    def loop(state: State) -> Iterator[Step]:
        empty = torch.zeros(4, 0, D, device=state.device, dtype=state.parts.dtype)
        keys = values = empty
        for state.step in range(10**9):
            if state.step % 6 == 0:
                keys = values = torch.zeros_like(state.normal(0, 4, 2, D))
            state.mark()
            output, keys, values = state.call(state.normal(state.step % 3, 4, 1, D), keys, values)
            if copies:
                keys, values = keys.clone(), values.clone()
            yield Step(outputs={"out": output.clone()})

    return loop


def heads_late(late: bool) -> Callable[[State], Iterator[Step]]:
    """Return a loop whose uncompiled head has its backward in the same step, or after the next features are
    made: only the autograd graph holds its saved tensors of the earlier ones.
    """

    def loop(state: State) -> Iterator[Step]:
        waiting: Tensor | None = None
        for state.step in range(10**9):
            state.mark()
            with torch.no_grad():
                features = state.call(state.normal(state.step % 3, 8, D), module="body")
            state.optimizer.zero_grad()
            loss = squares(state, state["head"](features))
            (waiting if late and waiting is not None else loss).backward(retain_graph=late)
            waiting = loss
            state.optimizer.step()
            yield Step({"loss": loss.detach().clone()})

    return loop


def body_and_head() -> dict[str, nn.Module]:
    return {"body": Mlp(D, 32, D).requires_grad_(False), "head": nn.Linear(D, 8)}


def judges(reads: str) -> Callable[[State], Iterator[Step]]:
    """Return a loop with two marks a step, in which the first call's result is read again, now and then, after the
    second; or a copy of it.
    """

    def loop(state: State) -> Iterator[Step]:
        for state.step in range(10**9):
            state.mark()
            first = state.call(state.normal(state.step % 3, 8, D))
            if reads == "copy":
                first = first.clone()
            state.mark()
            second = state.call(state.normal(5, 8, D))
            apart = first - second if state.step % 1000 == 999 else second
            yield Step(outputs={"apart": apart.clone()})

    return loop


def draws(state: State) -> Iterator[Step]:
    """Draw the next word from the likeliest five."""
    tokens = state.whole(3, WORDS, 4, LENGTH)
    while True:
        state.mark()
        best, which = state.call(tokens)[:, -1].topk(5)
        chosen = which.gather(1, torch.multinomial(best.softmax(-1).cpu(), 1).to(which))
        tokens = torch.cat([tokens[:, 1:], chosen], 1)
        yield Step(outputs={"chosen": chosen[:, 0].clone()})


def _sound() -> Iterator[Entry]:
    spectral = partial(parametrizations.spectral_norm, n_power_iterations=1)
    modules: dict[str, tuple[Any, Any]] = {
        "straight_through": (Quantised, ROWS),
        "ensemble": (Ensemble, ROWS),
        "forces": (Forces, ROWS),
        "cells": (Cells, SEQUENCE),
        "counting": (Counting, ROWS),
        "channels_last": (images, channels_last),
        "spectral": (lambda: Chain(spectral(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, 8)), ROWS),
        "noisy": (Noisy, ROWS),
        "views": (Parts, ROWS),
        "switching": (Switching, signs),
        "dropping": (lambda: Chain(nn.Linear(D, D), nn.Dropout(0.4), nn.Linear(D, 8)), ROWS),
    }
    for name, (make, inputs) in modules.items():
        period = 2 if name == "switching" else 1
        yield Entry(f"{name}_train", make, descends(inputs), period=period)
        yield Entry(f"{name}_inference", make, infers(inputs), "inference", period=period)
    yield Entry("follows", Mlp, follows)
    yield Entry("scales_bf16", Mlp, scales, autocast=True)
    yield Entry("hooks", Clamping, hooks)
    yield Entry("mixes", Mlp, mixes)
    yield Entry("schedules", Mlp, schedules)
    yield Entry("searches", Mlp, searches, optimize=lambda own: torch.optim.LBFGS(own, lr=0.3, max_iter=3))
    yield Entry("queues", slow, queues)
    yield Entry("learns_values", slow, learns_values)
    yield Entry("rolls_out", Mlp, rolls_out("buffer"))
    yield Entry("accumulates_by_turns", Mlp, accumulates_by_turns, period=2)
    yield Entry("sums_losses", Losing, sums_losses(rarely=False))
    yield Entry("reads_by_hook", Hooked, reads_by_hook(late=False), "inference")
    yield Entry("grows", Growing, grows(copies=True), "inference", period=6)
    yield Entry("heads", body_and_head, heads_late(late=False), compiled=("body",), fast=True)
    yield Entry("judges_copied", Mlp, judges("copy"), "inference")
    yield Entry("draws", Language, draws, "inference")
    adam = partial(torch.optim.Adam, lr=1e-2)
    yield Entry("capturable", Mlp, descends(ROWS), optimize=lambda own: adam(own, capturable=own[0].is_cuda))


def _wrong() -> Iterator[Entry]:
    made: dict[str, tuple[Any, Any, Any]] = {
        "rolls_out_held": (Mlp, rolls_out("list"), "train"),
        "losses_read_rarely": (Losing, sums_losses(rarely=True), "train"),
        "hook_read_late": (Hooked, reads_by_hook(late=True), "inference"),
        "grows_held": (Growing, grows(copies=False), "inference"),
        "head_late": (body_and_head, heads_late(late=True), "train"),
        "judged_read_rarely": (Mlp, judges("itself"), "inference"),
    }
    for name, (make, loop, phase) in made.items():
        compiled = ("body",) if name == "head_late" else ()
        period = 6 if name == "grows_held" else 1
        yield Entry(
            name, make, loop, phase, LIFETIME, HELD, ("cuda",), compiled=compiled, period=period,
            fast=name == "judged_read_rarely",
        )  # fmt: skip
    adds = partial(adversarial, clears=False)
    yield Entry(
        "adversarial_adds", adversaries, adds, "train", LIFETIME, "pytorch/pytorch#169545", ("cuda",), apart=True
    )


SOUND: tuple[Entry, ...] = tuple(_sound())
WRONG: tuple[Entry, ...] = tuple(_wrong())
