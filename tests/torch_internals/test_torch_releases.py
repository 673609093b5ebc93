"""What is wrong with an installed torch is said in one sentence, with what to install."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from service.torch_internals.installed import InstalledTorch, faults, installed_torch
from service.torch_internals.releases import TRIED, is_tried, listed, release_of

NEWEST = TRIED[-1]


OLD, NEW = InstalledTorch("2.10.1", None), InstalledTorch("2.99.0", None)
FOR_CPU, FOR_CUDA = InstalledTorch(f"{NEWEST}.0+cpu", None), InstalledTorch(f"{NEWEST}.0", "13.0")
OTHER_VISION = InstalledTorch(f"{NEWEST}.0", None, "0.1.0", "==2.1.0")


@pytest.mark.parametrize(
    ("installed", "gpus", "said", "advised", "works"),
    [
        (OLD, 0, "torch 2.10.1 is too old, Trivet needs 2.11 or newer", f'pip install "torch=={NEWEST}.*"', False),
        (NEW, 0, "torch 2.99.0 was not tried with this Trivet", f"install {listed(TRIED)}", True),
        (FOR_CPU, 2, "is built for the CPU and cannot use this host's 2 GPUs", f'"torch=={NEWEST}.0"', True),
        (FOR_CUDA, 0, "is built for CUDA 13.0 and the driver lists no GPU", "install NVIDIA's driver", True),
        (OTHER_VISION, 0, "torchvision 0.1.0 goes with torch==2.1.0, and", f'"torch=={NEWEST}.0" torchvision', True),
    ],
)
def test_a_fault_is_one_sentence_with_what_to_install(
    installed: InstalledTorch, gpus: int, said: str, advised: str, works: bool
) -> None:
    (fault,) = faults(installed, gpus)
    told, _, advice = str(fault).partition(": ")
    assert said in told
    assert advised in advice
    assert fault.works is works


@pytest.mark.parametrize(
    ("installed", "gpus"),
    [
        (InstalledTorch(f"{TRIED[0]}.0+cu130", "13.0"), 1),
        (InstalledTorch(f"{NEWEST}.1+cpu", None, "0.29.1", f"=={NEWEST}.1"), 0),
    ],
)
def test_nothing_is_wrong_with_a_tried_torch_that_suits_its_host(installed: InstalledTorch, gpus: int) -> None:
    assert list(faults(installed, gpus)) == []


def test_the_packages_say_what_torch_itself_says() -> None:
    found = installed_torch()
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda)


def test_releases_are_told_apart_by_their_first_two_numbers() -> None:
    assert [is_tried(each) for each in ("2.14.0", "2.14.1+cu130", "2.1.4", "2.140.0", "?")] == [
        True,
        True,
        *[False] * 3,
    ]
    assert listed(("2.11",)) == "torch 2.11"
    assert listed(("2.11", "2.13", "2.14")) == "torch 2.11, 2.13 or 2.14"
    with pytest.raises(ValueError, match="'nightly' is no version of torch; expected one like"):
        release_of("nightly")


def test_the_table_of_what_was_tried_names_each_release() -> None:
    text = (Path(__file__).parents[2] / "docs" / "run" / "deploy.md").read_text()
    assert [each for each in TRIED if f"| {each}." not in text] == []
