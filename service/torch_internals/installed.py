"""Says in one sentence what is wrong with the torch that is installed, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from service.torch_internals.releases import TRIED, is_tried, listed, release_of


@dataclass(frozen=True)
class InstalledTorch:
    """What the packages of this Python say of torch, without importing it. ``cuda`` is the release of CUDA that it is
    built for, ``None`` for a CPU build; ``vision`` and ``vision_wants`` are the version of torchvision and the torch
    that this requires, empty without it.
    """

    version: str
    cuda: str | None
    vision: str = ""
    vision_wants: str = ""


def installed_torch() -> InstalledTorch:
    """Read it from the packages. Raises ``PackageNotFoundError`` without torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise importlib.metadata.PackageNotFoundError("torch")
    written = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    version, cuda = str(written["__version__"]), written["cuda"]
    try:
        vision = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return InstalledTorch(version, cuda)
    required = map(Requirement, importlib.metadata.requires("torchvision") or ())
    wants = next((str(each.specifier) for each in required if each.name == "torch"), "")
    return InstalledTorch(version, cuda, vision, wants)


@dataclass(frozen=True)
class TorchFault:
    """One thing that is wrong with the installed torch, and what to install. With ``works`` jobs run all the same, all
    or some of them.
    """

    told: str
    advice: str
    works: bool = True

    def __str__(self) -> str:
        return f"{self.told}: {self.advice}"


def faults(torch: InstalledTorch, gpus: int) -> Iterator[TorchFault]:
    """Yield what is wrong with ``torch`` on a host whose driver lists ``gpus`` GPUs."""
    release, newest = release_of(torch.version), TRIED[-1]
    if release < release_of(TRIED[0]):
        told = f"torch {torch.version} is too old, Trivet needs {TRIED[0]} or newer"
        yield TorchFault(told, f'pip install "torch=={newest}.*"', works=False)
    elif not is_tried(torch.version):
        told = f"torch {torch.version} was not tried with this Trivet; what it lacks will be refused by name"
        yield TorchFault(told, f"install {listed(TRIED)} if that is in the way")
    if gpus and torch.cuda is None:
        told = f"torch {torch.version} is built for the CPU and cannot use this host's {gpus} GPU{'s' * (gpus > 1)}"
        yield TorchFault(told, f'pip install --force-reinstall "torch=={_public(torch.version)}", as built for CUDA')
    if not gpus and torch.cuda is not None:
        told = f"torch {torch.version} is built for CUDA {torch.cuda} and the driver lists no GPU: jobs run on the CPU"
        yield TorchFault(told, "install NVIDIA's driver, or a torch built for the CPU, to be rid of its CUDA packages")
    if torch.vision_wants and not Requirement(f"torch{torch.vision_wants}").specifier.contains(_public(torch.version)):
        told = f"torchvision {torch.vision} goes with torch{torch.vision_wants}, and torch {torch.version} is installed"
        yield TorchFault(told, f'pip install --upgrade "torch=={_public(torch.version)}" torchvision')


def _public(version: str) -> str:
    return version.partition("+")[0]
