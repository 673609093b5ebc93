"""Programs whose compiled run is right: modules in training and inference, and loops of all kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.compile_corpus.modules import IN_BF16, LENGTH, MODULES, TRAINED, WORDS, D, Language
from benchmarks.compile_corpus.programs import Entry, Mlp, State, descends, infers, normal, squares
from benchmarks.compile_corpus.replays import RIGHT
from service.compilation.program import Step

X = normal(8, D)
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda own: torch.optim.Adam(own, lr=1e-2),
    "adamw": lambda own: torch.optim.AdamW(own, lr=1e-2, weight_decay=0.1),
    "rmsprop": lambda own: torch.optim.RMSprop(own, lr=1e-3, eps=1e-3),
    "one_by_one": lambda own: torch.optim.Adam(own, lr=1e-2, foreach=False),
}


def averaging(state: State) -> Iterator[Step]:
    """Keep a moving average of the parameters, and look at its output."""
    average = copy.deepcopy({name: each.detach() for name, each in state["net"].named_parameters()})
    for step in descends(X)(state):
        with torch.no_grad():
            for name, each in state["net"].named_parameters():
                average[name].lerp_(each, 0.1)
        yield Step(step.losses, {name: each.clone() for name, each in average.items()})


def adversaries() -> dict[str, nn.Module]:
    return {"made": Mlp(D, 32, D), "judge": Mlp(D, 32, 1)}


def adversarial(state: State, clears: bool = True) -> Iterator[Step]:
    """Train a generator and a discriminator in turns, each in a marked step of its own.

    The discriminator's gradients are dropped before the generator's step, unless it ``clears`` none: then that adds to
    them, overwritten as they are.
    """
    own = dict(zip(("made", "judge"), state.parts.optimizers, strict=True))
    binary = nn.functional.binary_cross_entropy_with_logits
    for state.step in range(10**9):
        state.mark()
        noise, real = state.normal(3 * state.step % 7, 8, D), state.normal(1, 8, D)
        own["judge"].zero_grad()
        with torch.no_grad():
            made = state.call(noise, module="made").clone()
        right = state.call(torch.cat([real, made]), module="judge")
        judged = binary(right, torch.cat([torch.ones_like(right[:8]), torch.zeros_like(right[8:])]))
        judged.backward()
        own["judge"].step()
        if clears:
            own["judge"].zero_grad()
        own["made"].zero_grad()
        state.mark()
        fooled = state.call(state.call(noise, module="made"), module="judge")
        loss = binary(fooled, torch.ones_like(fooled))
        loss.backward()
        own["made"].step()
        yield Step({"judged": judged.detach(), "made": loss.detach()})


def frozen() -> dict[str, nn.Module]:
    return {"body": Mlp(D, 32, D).requires_grad_(False), "head": nn.Linear(D, 8)}


def on_frozen(state: State) -> Iterator[Step]:
    while True:
        state.begin_step()
        with torch.no_grad():
            hidden = state.call(*X(state), module="body")
        loss = squares(state, state.call(hidden, module="head"))
        yield state.descend(loss)


def teacher() -> dict[str, nn.Module]:
    return {"teacher": Mlp().requires_grad_(False), "net": Mlp(hidden=8)}


def distils(state: State) -> Iterator[Step]:
    while True:
        state.begin_step()
        with torch.no_grad():
            wanted = state.call(*X(state), module="teacher").softmax(-1)
        loss = nn.functional.kl_div(state.call(*X(state)).log_softmax(-1), wanted, reduction="batchmean")
        state.step += 1
        yield state.descend(loss)


def siamese(state: State) -> Iterator[Step]:
    while True:
        state.begin_step()
        one, other = (nn.functional.normalize(state.call(state.normal(index, 8, D)), dim=-1) for index in range(2))
        loss = nn.functional.cross_entropy(one @ other.t() / 0.5, torch.arange(8, device=state.device))
        yield state.descend(loss)


def classifies(weight: float, smoothing: float, scheduled: bool = False) -> Callable[[State], Iterator[Step]]:
    def loop(state: State) -> Iterator[Step]:
        for state.step in range(10**9):
            state.mark()
            for group in state.optimizer.param_groups:
                group["lr"] = 0.05 / (1 + 0.1 * state.step) if scheduled else group["lr"]
            state.optimizer.zero_grad()
            scores = state.call(*X(state))
            wanted = state.whole(state.step % 3, 8, 8)
            loss = nn.functional.cross_entropy(scores, wanted, label_smoothing=smoothing) * weight
            loss.backward()
            state.optimizer.step()
            yield Step({"loss": loss.detach()}, {"right": (scores.argmax(-1) == wanted).sum()})

    return loop


def denoises(state: State) -> Iterator[Step]:
    """Take a training step of a diffusion model: noise of a strength drawn for each sample."""
    while True:
        state.begin_step()
        clean = state.normal(1, 8, D)
        strength = torch.rand(8, 1).to(clean)
        noise = torch.randn(8, D).to(clean)
        noisy = strength.sqrt() * clean + (1 - strength).sqrt() * noise
        loss = (state.call(torch.cat([noisy, strength], 1)) - noise).square().mean()
        yield state.descend(loss)


def samples(state: State) -> Iterator[Step]:
    """Go the way back of a diffusion model, several calls for one result."""
    while True:
        state.mark()
        x = state.normal(3, 8, D)
        for level in range(4, 0, -1):
            strength = torch.full((8, 1), level / 5, dtype=x.dtype, device=x.device)
            x = x - 0.2 * state.call(torch.cat([x, strength], 1)).clone()
        yield Step(outputs={"x": x})


def decodes(state: State) -> Iterator[Step]:
    """Take the likeliest word, again and again, over a window of fixed length."""
    tokens = state.whole(3, WORDS, 4, LENGTH)
    while True:
        state.mark()
        chosen = state.call(tokens)[:, -1].argmax(-1).clone()
        tokens = torch.cat([tokens[:, 1:], chosen[:, None]], 1)
        yield Step(outputs={"chosen": chosen})


class Attending(nn.Module):
    """Attends to its cache of all words so far."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.register_buffer("keys", torch.zeros(4, LENGTH, D))
        self.register_buffer("values", torch.zeros(4, LENGTH, D))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        query, key, value = self.lift(x).chunk(3, -1)
        self.keys.index_copy_(1, place, key)
        self.values.index_copy_(1, place, value)
        hidden = torch.arange(LENGTH, device=x.device) > place
        scores = (query @ self.keys.transpose(1, 2)).masked_fill(hidden, float("-inf"))
        return self.out(scores.softmax(-1) @ self.values)


def with_cache(state: State) -> Iterator[Step]:
    for state.step in range(10**9):
        state.mark()
        place = torch.tensor([state.step % LENGTH], device=state.device)
        output = state.call(state.normal(state.step % 5, 4, 1, D), place)
        yield Step(outputs={"out": output.clone(), "keys": state["net"].keys.clone()})


def two_shapes(state: State) -> tuple[Tensor]:
    return (state.normal(state.step % 3, 8 if state.step % 2 else 5, D),)


def sharpness_aware(state: State) -> Iterator[Step]:
    """Step from where the loss is largest near by: two forwards and backwards for each step."""
    while True:
        state.begin_step()
        squares(state, state.call(*X(state))).backward()
        own = list(state["net"].parameters())
        with torch.no_grad():
            moved = [0.05 * each.grad / (each.grad.norm() + 1e-3) for each in own]
            for each, by in zip(own, moved, strict=True):
                each.add_(by)
        state.optimizer.zero_grad()
        state.mark()
        loss = squares(state, state.call(*X(state)))
        loss.backward()
        with torch.no_grad():
            for each, by in zip(own, moved, strict=True):
                each.sub_(by)
        state.optimizer.step()
        yield Step({"loss": loss.detach()})


def rewarded(state: State) -> Iterator[Step]:
    """Take a step of a policy gradient on actions that are drawn."""
    while True:
        state.begin_step()
        chances = state.call(*X(state)).log_softmax(-1)
        taken = state.whole(4, 8, 8)
        reward = (taken % 3).to(chances.dtype)
        loss = -(chances.gather(1, taken[:, None]).squeeze(1) * (reward - reward.mean())).mean()
        yield state.descend(loss)


def _modules() -> Iterator[Entry]:
    for name, (make, inputs) in MODULES.items():
        fast = name in ("perceptron", "sequential", "layer_norm")
        yield Entry(f"{name}_train", make, descends(inputs), fast=fast)
        yield Entry(f"{name}_inference", make, infers(inputs), "inference", fast=name == "perceptron")
    for name, (make, inputs) in TRAINED.items():
        # Inductor of torch 2.11 has other numbers of this one on a CPU, in plain torch too.
        unsound = ("cpu 2.11",) if name == "quantizer" else ()
        yield Entry(f"{name}_train", make, descends(inputs), fast=name == "dropout", unsound=unsound)
    for name in IN_BF16:
        make, inputs = MODULES[name]
        yield Entry(f"{name}_train_bf16", make, descends(inputs), autocast=True)
        # Compiled for a CPU, this layer gives float32, where its fast way in eager gives bfloat16.
        unsound = ("cpu 2.11", "cpu 2.13", "cpu 2.14") if name == "encoder" else ()
        yield Entry(f"{name}_inference_bf16", make, infers(inputs), "inference", autocast=True, unsound=unsound)
    for name, optimize in OPTIMIZERS.items():
        yield Entry(f"perceptron_{name}", Mlp, descends(X), optimize=optimize)


def _loops() -> Iterator[Entry]:
    noisy = partial(Mlp, D + 1, 32, D)
    yield Entry("clipped", Mlp, descends(X, clip=0.5))
    yield Entry("averaged", Mlp, averaging)
    yield Entry("adversarial", adversaries, adversarial, apart=True, fast=True)
    yield Entry("frozen_body", frozen, on_frozen, fast=True)
    yield Entry("distilled", teacher, distils)
    yield Entry("siamese", Mlp, siamese)
    yield Entry("classified", Mlp, classifies(1.0, 0.0))
    yield Entry("smoothed", Mlp, classifies(1.0, 0.1, scheduled=True))
    yield Entry("scaled_loss", Mlp, classifies(128.0, 0.0))
    yield Entry("denoised", noisy, denoises)
    yield Entry("sampled", noisy, samples, "inference")
    yield Entry("decoded", Language, decodes, "inference")
    yield Entry("cached", Attending, with_cache, "inference")
    yield Entry("two_shapes_train", Mlp, descends(two_shapes), period=2)
    yield Entry("two_shapes_inference", Mlp, infers(two_shapes), "inference", period=2)
    yield Entry("sharpness_aware", Mlp, sharpness_aware)
    yield Entry("rewarded", Mlp, rewarded)
    yield from RIGHT


SOUND: tuple[Entry, ...] = (*_modules(), *_loops())
