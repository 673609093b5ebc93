"""Models of ``torchvision``, ``timm`` and ``transformers``, if these are installed, with random weights.

Unchanged, in bf16, with dropout, with checkpoints, partly frozen, in micro-batches, averaged, with a cache.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.compile_corpus.modules import LENGTH, MODULES, WORDS
from benchmarks.compile_corpus.programs import (
    LIFETIME,
    Entry,
    Inputs,
    State,
    descends,
    infers,
    normal,
    squares,
    tensor_of,
)
from service.compilation.program import Step

Make = Callable[[], nn.Module]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WET = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
GPT2_DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
CAUSAL = ("gpt2", "llama", "mixtral", "opt")
IMAGES, TOKENS = normal(8, 3, 32, 32), MODULES["language"][1]


def _vision(name: str) -> nn.Module:
    return importlib.import_module("torchvision.models").get_model(name, weights=None, num_classes=8)


def _frozen(name: str) -> nn.Module:
    made = _vision(name).requires_grad_(False)
    made.fc.requires_grad_(True)
    return made


def _timm(name: str, *, recomputed: bool = False, **fields: Any) -> nn.Module:
    made = importlib.import_module("timm").create_model(name, pretrained=False, num_classes=8, **fields)
    if recomputed:
        made.set_grad_checkpointing()
    return made


def _language(kind: str, *, recomputed: bool = False, **fields: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    config = library.AutoConfig.for_model(kind, vocab_size=WORDS, **fields)
    made = (library.AutoModelForCausalLM if kind in CAUSAL else library.AutoModel).from_config(config)
    if recomputed:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return made


def _both_sides(state: State) -> tuple[Any, ...]:
    """Return the inputs of an encoder and a decoder."""
    tokens = TOKENS(state)[0]
    return tokens, None, tokens.flip(1)


def accumulates(inputs: Inputs) -> Callable[[State], Iterator[Step]]:
    """Return a loop of two micro-batches a step."""

    def loop(state: State) -> Iterator[Step]:
        while True:
            state.begin_step()
            losses = []
            for _ in range(2):
                loss = squares(state, tensor_of(state.call(*inputs(state)))) / 2
                loss.backward()
                losses.append(loss.detach().clone())
                state.step += 1
            state.optimizer.step()
            yield Step({"loss": torch.stack(losses).sum()})

    return loop


def averages(inputs: Inputs) -> Callable[[State], Iterator[Step]]:
    """Return a loop that lets a moving average of the weights follow."""

    def loop(state: State) -> Iterator[Step]:
        average = AveragedModel(state["net"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in descends(inputs)(state):
            average.update_parameters(state["net"])
            first = next(average.module.parameters())
            yield Step(step.losses, {"averaged": first.detach().clone()})

    return loop


def caches(early: bool) -> Callable[[State], Iterator[Step]]:
    """Return a loop that decodes word by word with a cache of fixed size, which is filled in place: made before, or in
    the first compiled call, whose memory it then is.
    """

    def loop(state: State) -> Iterator[Step]:
        library = importlib.import_module("transformers")
        config = state["net"].config
        cache = library.StaticCache(config=config, max_cache_len=LENGTH)
        if early:
            heads = config.num_key_value_heads
            width = config.hidden_size // config.num_attention_heads
            cache.early_initialization(4, heads, width, state.parts.dtype, state.device)
        for state.step in range(10**9):
            if state.step % LENGTH == 0 and state.step:
                cache.reset()
            state.mark()
            output = state.call(state.whole(state.step % 5, WORDS, 4, 1), past_key_values=cache, use_cache=True)
            yield Step(outputs={"out": output.logits.clone()})

    return loop


def _entries() -> Iterator[tuple[str, str, Make, Callable[[State], Iterator[Step]], str]]:
    """Yield a library, a name, what makes the model, its loop, and of what kind that is."""
    plain: dict[str, tuple[str, Make, Inputs]] = {
        "resnet18": ("torchvision", partial(_vision, "resnet18"), IMAGES),
        "mobilenet_v3_small": ("torchvision", partial(_vision, "mobilenet_v3_small"), normal(8, 3, 64, 64)),
        "vit_timm": ("timm", partial(_timm, "vit_tiny_patch16_224", img_size=32, depth=2), IMAGES),
        "convnext_timm": ("timm", partial(_timm, "convnext_atto"), IMAGES),
        "gpt2": ("transformers", partial(_language, "gpt2", **GPT2, **GPT2_DRY), TOKENS),
        "llama": ("transformers", partial(_language, "llama", **SMALL), TOKENS),
        "mixtral": ("transformers", partial(_language, "mixtral", **SMALL, **MIXED), TOKENS),
        "bert": ("transformers", partial(_language, "bert", **SMALL, **DRY), TOKENS),
        "electra": ("transformers", partial(_language, "electra", **SMALL, **DRY, embedding_size=32), TOKENS),
        "t5": ("transformers", partial(_language, "t5", **T5), _both_sides),
    }
    for name, (library, make, inputs) in plain.items():
        yield library, f"{name}_train", make, descends(inputs), "train"
        yield library, f"{name}_inference", make, infers(inputs), "inference"
        if name in ("vit_timm", "llama", "bert"):
            yield library, f"{name}_train_bf16", make, descends(inputs), "bf16"
            yield library, f"{name}_inference_bf16", make, infers(inputs), "inference bf16"
    vit = partial(_timm, "vit_tiny_patch16_224", img_size=32, depth=2)
    llama = partial(_language, "llama", **SMALL)
    yield "torchvision", "resnet18_frozen", partial(_frozen, "resnet18"), descends(IMAGES), "train"
    yield "timm", "vit_timm_dropout", partial(vit, drop_rate=0.1, drop_path_rate=0.2), descends(IMAGES), "train"
    yield "timm", "vit_timm_recomputed", partial(vit, recomputed=True), descends(IMAGES), "train"
    yield "timm", "vit_timm_averaged", vit, averages(IMAGES), "train"
    yield "transformers", "gpt2_dropout", partial(_language, "gpt2", **GPT2), descends(TOKENS), "train"
    yield "transformers", "bert_dropout", partial(_language, "bert", **SMALL, **WET), descends(TOKENS), "train"
    yield "transformers", "llama_recomputed", partial(llama, recomputed=True), descends(TOKENS), "train"
    yield "transformers", "llama_accumulated", llama, accumulates(TOKENS), "train"
    yield "transformers", "llama_cached", llama, caches(early=True), "inference"
    yield "transformers", "llama_lazily_cached", llama, caches(early=False), "inference"


def _installed() -> Iterator[Entry]:
    for library, name, make, loop, kind in _entries():
        if importlib.util.find_spec(library) is not None:
            yield Entry(
                f"{library}_{name}",
                make,
                loop,
                "inference" if "inference" in kind else "train",
                autocast="bf16" in kind,
                optimize=partial(torch.optim.SGD, lr=1e-3),
                bug=LIFETIME if name.endswith("lazily_cached") else "",
                thread="pytorch/pytorch#175557" if name.endswith("lazily_cached") else "",
                shows=("cuda",),
                period=LENGTH if name.endswith("cached") else 1,
                unsound=("cpu 2.11",) if name == "convnext_timm_train" else (),  # gradients of 1e-7 of eager's size
            )


_ALL: tuple[Entry, ...] = tuple(_installed())
SOUND: tuple[Entry, ...] = tuple(entry for entry in _ALL if not entry.bug)
WRONG: tuple[Entry, ...] = tuple(entry for entry in _ALL if entry.bug)
