"""Trains architectures of installed packages by name, beside plain torch: two steps, and one that is resumed.

    python benchmarks/families.py [--only NAME …]
    torchrun --nproc-per-node 2 benchmarks/families.py         # under FSDP, by the statistics of both ranks
    torchrun --nproc-per-node 2 benchmarks/families.py --tp    # over tensor-parallel ranks, by their own plans

Each is trained for two steps by the training job, once more with a resumption in between, and by a loop of plain torch
from the same weights, in the same process, all in float64. *Losses*, *weights* and *resumed* are the largest relative
differences from the loop, or from the run without a resumption: of losses, and of parameters and buffers as a share of
the largest number in them, or of the learning rate, which AdamW's first steps take of a gradient that is only rounding;
``0`` is equality of every bit. The objective of texts is not torch's own. Pictures have
3 × 64 × 64 numbers, texts 32 bytes.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from recording_reporter import RecordingReporter
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from service.jobs.files import DataLayout
from service.jobs.runtime import RunContext
from service.jobs.spec.families.huggingface import DIVIDED
from service.jobs.spec.families.packaged import versions_here
from service.jobs.spec.train import TrainSpec
from service.models import build, data
from service.models.data import BatchOrder, Split
from service.models.packaged.base import PackagedError
from service.models.randomness import seed_all
from service.parallel import distributed
from service.training import job, setup

SIDE, CLASSES, SEQUENCE, STEPS, RATE = 64, 10, 32, 2, 1e-3
PREFIX = "blocks.0."
LOAD = setup.load_inputs
ATTENTION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
KV = {**ATTENTION, "num_key_value_heads": 1}
TEXT: Mapping[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
    },
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": ATTENTION,
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, "dropout": 0.0},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "llama": KV,
    "mistral": KV,
    "qwen2": KV,
    "qwen3": {**KV, "head_dim": 16},
    "gemma": {**KV, "head_dim": 16},
    "gemma2": {**KV, "head_dim": 16},
    "phi": ATTENTION,
    "phi3": {**KV, "pad_token_id": 0},
    "stablelm": KV,
    "starcoder2": KV,
    "olmo": KV,
    "olmo2": KV,
    "granite": KV,
    "cohere": KV,
    "smollm3": {**KV, "pad_token_id": 0},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 2},
    "bert": {**ATTENTION, "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
PICTURES: Mapping[str, dict[str, Any]] = {
    "vit": {
        **ATTENTION,
        "image_size": SIDE,
        "hidden_dropout_prob": 0.0,
    },
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "convnext": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "regnet": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "groups_width": 8},
    "mobilenet_v2": {"image_size": SIDE, "classifier_dropout_prob": 0.0},
}
TIMM: Mapping[str, dict[str, Any]] = {
    "resnet10t": {},
    "resnet18": {},
    "regnetx_002": {},
    "mobilenetv3_small_050": {},
    "efficientnet_b0": {},
    "tinynet_e": {},
    "lcnet_035": {},
    "mnasnet_small": {},
    "ghostnet_050": {},
    "repvgg_a0": {},
    "densenet121": {},
    "convnext_atto": {},
    "mobilevit_xxs": {},
    "edgenext_xx_small": {},
    "vit_tiny_patch16_224": {"depth": 2},
    "deit_tiny_patch16_224": {"depth": 2},
    "cait_xxs24_224": {"depth": 2},
    "resmlp_12_224": {},
    "swin_tiny_patch4_window7_224": {"drop_path_rate": 0.0, "window_size": 4, "embed_dim": 24, "depths": [1, 1, 1, 1]},
    "xcit_nano_12_p16_224": {},
}
TORCHVISION: Mapping[str, dict[str, Any]] = {
    "resnet18": {},
    "squeezenet1_1": {"dropout": 0.0},
    "shufflenet_v2_x0_5": {},
    "mobilenet_v2": {"dropout": 0.0},
    "mobilenet_v3_small": {"dropout": 0.0},
    "mnasnet0_5": {"dropout": 0.0},
    "regnet_y_400mf": {},
    "googlenet": {"aux_logits": False, "dropout": 0.0},
}
OTHER_SIZES: Mapping[str, dict[str, Any]] = {
    "codegen": {**TEXT["codegen"], "n_head": 4},
    "gpt_neox": {**ATTENTION, "num_attention_heads": 4},
    "gptj": {**TEXT["gptj"], "n_head": 4, "rotary_dim": 4},
    "helium": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}


def divided() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the model of every architecture that tensor-parallel ranks divide."""
    size = {**ATTENTION, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    tokens = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
    for name in sorted(DIVIDED):
        fields = OTHER_SIZES[name] if name in ("codegen", "gpt_neox", "gptj") else size | OTHER_SIZES.get(name, {})
        model = {"family": "huggingface", "config": {"model_type": name, **tokens, **fields}, "sequence": SEQUENCE}
        yield f"huggingface {name}", model


def specs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the model of every case."""
    picture = {"height": SIDE, "width": SIDE, "classes": CLASSES}
    for family, table in (("timm", TIMM), ("torchvision", TORCHVISION)):
        for name, options in table.items():
            yield f"{family} {name}", {"family": family, "name": name, "options": options, **picture}
    for name, fields in TEXT.items():
        config = {"model_type": name, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, **fields}
        yield f"huggingface {name}", {"family": "huggingface", "config": config, "sequence": SEQUENCE}
    for name, fields in PICTURES.items():
        config = {"model_type": name, "num_labels": CLASSES, **fields}
        model = {"family": "huggingface", "config": config, "task": "image-classification", "image": [3, SIDE, SIDE]}
        yield f"huggingface {name}", model


def spec_of(model: Mapping[str, Any], parallel: Mapping[str, int], **changes: Any) -> TrainSpec:
    synthetic = {"source": "synthetic", "features": 3 * SIDE * SIDE, "classes": CLASSES, "samples": 64}
    reads_text = "sequence" in model
    fields = {
        "model": model,
        "data": {"source": "tokens", "sequence": SEQUENCE} if reads_text else synthetic,
        "batch": {"global": 8},
        "optimizer": {"clip_norm": None, "lr": RATE},
        "schedule": {"decay": "constant"},
        "evaluate": {"samples": 8},
        "parallel": parallel,
        "steps": STEPS,
    }
    return TrainSpec.model_validate({**fields, **changes})


def train(folder: Path, spec: TrainSpec, job_id: str) -> list[float]:
    """Run a training job, and return its losses."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    report = RecordingReporter()
    with patch.object(setup, "load_inputs", in_float64):
        job.run(spec, RunContext(job_id, 1, rank, rank, world, "cpu", DataLayout(folder), report, bool))
    return list(report.series("loss"))


def in_float64(*arguments: Any) -> setup.TrainingInputs:
    inputs = LOAD(*arguments)
    held = inputs.dataset
    return replace(inputs, dataset=replace(held, train=wide(held.train), test=wide(held.test)), state=torch.float64)


def wide(split: Any) -> Split:
    return replace(split, inputs=split.inputs.double()) if split.inputs.is_floating_point() else split


def plain_torch(spec: TrainSpec) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the final state of a loop that knows nothing of Trivet but its weights and draws."""
    model = build(spec.model, seed=spec.seed, dtype=torch.float64).get_submodule("blocks.0")
    samples = wide(data.load(spec.data).train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
    losses = []
    model.train()
    for step in range(spec.steps):
        batch = samples.take(BatchOrder(spec.seed, len(samples), spec.batch.global_).indices(step))
        seed_all(spec.seed, "step", step, 0, 0)
        loss = functional.cross_entropy(model(batch.inputs).flatten(0, -2), batch.targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, state_of(model)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    held = {name: value.detach().clone() for name, value in model.named_parameters()}
    return held | {name: value for name, value in model.state_dict().items() if name in dict(model.named_buffers())}


def published(folder: Path, job_id: str) -> dict[str, Tensor]:
    held = load_file(DataLayout(folder).job(job_id).artifacts / "model.safetensors")
    return {name.removeprefix(PREFIX): value for name, value in held.items()}


def apart(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two states, as a share of the largest number in each tensor or of a step."""
    if set(own) != set(other):
        return float("inf")
    pairs = ((own[name].double(), other[name].double()) for name in own if own[name].numel())
    return max(float((one - two).abs().max() / two.abs().max().clamp(min=RATE)) for one, two in pairs)


@contextmanager
def scratch(ranks: int) -> Iterator[Path]:
    """Yield a folder that all ranks share."""
    with tempfile.TemporaryDirectory() as own:
        path = [own]
        if ranks > 1:
            torch.distributed.broadcast_object_list(path, src=0)
        yield Path(path[0])
        if ranks > 1:
            torch.distributed.barrier()


def compare(model: Mapping[str, Any], axis: str, ranks: int) -> tuple[int, float, float, float]:
    """Return a model's parameters, and the differences of losses, of weights and of the resumed run."""
    parallel = {axis: ranks}
    whole, half, rest = ("job_" + letter * 20 for letter in "whr")
    with scratch(ranks) as folder:
        losses = train(folder, spec_of(model, parallel), whole)
        train(folder, spec_of(model, parallel, steps=1), half)
        train(folder, spec_of(model, parallel, resume={"job": half}), rest)
        if losses:
            expected, state = plain_torch(spec_of(model, {}))
            own, resumed = published(folder, whole), published(folder, rest)
            differ = max(abs(one - two) / abs(two) for one, two in zip(losses, expected, strict=True))
            size = sum(value.numel() for value in own.values())
            return size, differ, apart(own, state), apart(resumed, own)
    return 0, 0.0, 0.0, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of cases")
    parser.add_argument("--tp", action="store_true", help="over tensor-parallel ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.start("cpu")
    ranks, first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    if first:
        packages = ", ".join(f"{name} {number}" for name, number in versions_here().items())
        print(f"{ranks} ranks, torch {torch.__version__}, {packages}, {platform.machine()}")
        print("| architecture | numbers | losses | weights | resumed | s |\n|---|--:|--:|--:|--:|--:|")
    for name, model in divided() if options.tp else specs():
        if options.only and not any(part in name for part in options.only):
            continue
        began = time.monotonic()
        try:
            size, losses, weights, resumed = compare(model, "tp" if options.tp else "dp_shard", ranks)
            row = f"{size:,} | {losses:.1g} | {weights:.1g} | {resumed:.1g} | {time.monotonic() - began:.1f}"
        except Exception as error:
            if ranks > 1 and not isinstance(error, PackagedError):  # which all ranks raise
                raise
            row = f"{type(error).__name__}: {str(error)[:160]} | | | |"
        if first:
            print(f"| {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
