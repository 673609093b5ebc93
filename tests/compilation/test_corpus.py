"""The corpus of the compile check: its bugs are caught, its sound programs pass. On a CPU; `benchmarks/compile_corpus`
runs it on a GPU too, and in plain torch.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.compile_corpus.measure import measured
from benchmarks.compile_corpus.programs import LIFETIME, Entry
from benchmarks.compile_corpus.registry import ALL

pytestmark = pytest.mark.usefixtures("_imports_set_aside")


VERSION = ".".join(torch.__version__.split(".")[:2])
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


def cases(*, bugs: bool) -> list[object]:
    chosen = [entry for entry in ALL if bool(entry.bug) == bugs and entry.name not in SAME_CODE]
    shown = {entry.name for entry in chosen if entry.fast and entry.name in SHOWN}
    return [pytest.param(each, id=each.name, marks=() if each.name in shown else pytest.mark.slow) for each in chosen]


@pytest.mark.parametrize("entry", cases(bugs=True))
def test_a_bug_is_caught(entry: Entry) -> None:
    if not entry.is_wrong("cpu", VERSION):
        pytest.skip(f"torch {VERSION} does not have this bug ({entry.thread}), which others have: {entry.versions}")
    row = measured(entry, "cpu", fast=entry.fast or entry.bug == LIFETIME, without="plain")
    assert row["stopped"], row


@pytest.mark.parametrize("entry", cases(bugs=False))
def test_a_sound_program_passes_where_no_code_is_generated(entry: Entry) -> None:
    row = measured(entry, "cpu", fast=True, without="plain")
    assert not row["stopped"] or entry.is_wrong("cpu", VERSION), row


def test_the_corpus_is_as_large_as_it_says() -> None:
    assert sum(bool(entry.bug) for entry in ALL) >= 60
    assert sum(not entry.bug for entry in ALL) >= 100
    assert all(entry.thread for entry in ALL if entry.bug)
