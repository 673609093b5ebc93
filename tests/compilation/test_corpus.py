"""The corpus of the compile check: its bugs are caught, its sound programs pass. On a CPU, each bug on the first rung
that shows it; `benchmarks/compile_corpus` climbs the whole ladder, on a GPU too, and runs everything in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.compile_corpus import libraries
from benchmarks.compile_corpus.measure import measured
from benchmarks.compile_corpus.programs import Entry
from benchmarks.compile_corpus.registry import ALL

VERSION, FIRST_RUNGS = ".".join(torch.__version__.split(".")[:2]), ("2.13", "2.14")
"""This version of torch, and those on which the first rungs of bugs were seen."""
SHOWN = {
    "layer_norm_train",
    "heads",
    "retained",
    "held_dict_itself",
    "level_exp",
    "fast_way_slope",
    "ring_tail",
    "shadowed",
}
"""What the fast command tries: two sound programs, and of those with a bug one of each kind that needs no generated
code. That every detector fires is for its own tests and for the self-test."""

SAME_CODE = {"pool_2d_5_3", "pool_3d_3_2", "pool_1d_3_2", "clamp_both", "clamp_silu", "halves_4", "bits_5"}
"""Sizes and shapes of bugs of generated code that `benchmarks/compile_corpus` tries: here one of each bug is enough."""

PLAIN_LOOPS = {"descends.<locals>.loop", "infers.<locals>.loop"}
"""The loops of most programs, which only train a module or look at its output."""
WITH_A_RISK = {
    "layer_norm_train": "layers alone",
    "perceptron_adam": "an optimizer with a state",
    "batch_norm_train": "running means",
    "spectral_train": "a vector that each forward renews",
    "counting_train": "a number that counts calls",
    "quantizer_train": "codes that follow the nearest samples",
    "straight_through_train": "a rounding with a gradient of its own",
    "pooled_train": "the largest of several",
    "two_experts_train": "parameters that only some samples reach",
    "dropout_train": "draws",
    "stochastic_depth_train": "draws of the module's own",
    "checkpoint_dropout_train": "draws that a backward repeats",
    "noisy_train": "noise on the parameters",
    "broken_train": "a graph in two parts",
    "deciding_train": "a way that depends on the input",
    "switching_train": "two ways in turns",
    "two_shapes_train": "two shapes in turns",
    "forces_inference": "gradients within a forward",
    "ensemble_train": "torch.func",
    "cells_train": "layers that are called again and again",
    "views_train": "results that share their memory",
    "channels_last_train": "strides",
    "weight_norm_train": "computed parameters",
    "bag_train": "rows of a table",
    "graph_train": "sums whose order is free",
    "language_tied_train": "a parameter with two names",
    "encoder_inference": "a fast way of torch's own",
    "attention_train_bf16": "autocast",
    "language_recomputed_train_bf16": "autocast that a backward repeats",
    "convolution_norm_inference": "fixed means",
}
"""Of the programs with these loops, those that have something of their own that could raise a false alarm, and what."""


def bugs() -> Iterator[Entry]:
    return (entry for entry in ALL if entry.bug and entry.name not in SAME_CODE)


def sound() -> Iterator[Entry]:
    """Yield one program of each loop, and of those with a plain loop the ones with a risk; models of libraries and all
    others are for `benchmarks/compile_corpus`.
    """
    seen: set[object] = set()
    for entry in ALL:
        if entry.bug or entry in libraries.SOUND:
            continue
        loop = (entry.loop.__module__, entry.loop.__qualname__)
        if entry.name in WITH_A_RISK or (loop[1] not in PLAIN_LOOPS and loop not in seen):
            seen.add(loop)
            yield entry


def cases(chosen: Iterator[Entry]) -> list[object]:
    return [
        pytest.param(each, id=each.name, marks=() if each.fast and each.name in SHOWN else pytest.mark.slow)
        for each in chosen
    ]


@pytest.mark.parametrize("entry", cases(bugs()))
def test_a_bug_is_caught(entry: Entry) -> None:
    if not entry.is_wrong("cpu", VERSION):
        pytest.skip(f"torch {VERSION} does not have this bug ({entry.thread}), which others have: {entry.versions}")
    row = measured(entry, "cpu", fast=True, without="plain")
    if not row["stopped"] and VERSION not in FIRST_RUNGS:
        row = measured(entry, "cpu", without="plain")
    assert row["stopped"], row


@pytest.mark.parametrize("entry", cases(sound()))
def test_a_sound_program_passes_where_no_code_is_generated(entry: Entry) -> None:
    row = measured(entry, "cpu", fast=True, without="plain")
    assert not row["stopped"] or entry.is_wrong("cpu", VERSION), row


def test_the_corpus_is_as_large_as_it_says() -> None:
    assert sum(bool(entry.bug) for entry in ALL) >= 60
    assert sum(not entry.bug for entry in ALL) >= 100
    assert all(entry.thread for entry in ALL if entry.bug)
    assert {entry.name for entry in ALL if not entry.bug}.issuperset(WITH_A_RISK)
