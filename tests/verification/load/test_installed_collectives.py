"""A model family of an installed package whose layers call torch's functional collectives is verified on a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

DECLARED = """
from typing import Literal
from pydantic import Field
from service.jobs.plugins import Features, ModelConfig, ModelFamily

class Config(ModelConfig):
    family: Literal["handwritten"] = "handwritten"
    features: int = Field(ge=1)
    inner: int = Field(ge=1)

    @property
    def places(self):
        return 2

    @property
    def divided(self):
        return {"inner": self.inner}

    @property
    def reads(self):
        return Features(self.features, self.features, features_field="features", classes_field="features")

FAMILY = ModelFamily(Config, "handwritten.network:build")
"""
NETWORK = """
import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from service.models.initialize import Uniform
from service.parallel.mesh import SINGLE
from service.parallel.tensor.placement import local

class Block(nn.Module):
    sharded = {"up": 0, "down": 1}

    def __init__(self, config, axis):
        super().__init__()
        self.axis, inner = axis, config.inner // axis.size
        self.up = nn.Parameter(torch.empty(inner, config.features))
        self.down = nn.Parameter(torch.empty(config.features, inner))

    def forward(self, x):
        y = torch.relu(x @ local(self.up).T) @ local(self.down).T
        return torch.tanh(x + (all_reduce(y, "sum", self.axis.group) if self.axis.size > 1 else y))

class Network(nn.Module):
    before_blocks = after_blocks = ()
    output_axis = SINGLE

    def __init__(self, config, axis):
        super().__init__()
        self.config, self.blocks = config, nn.ModuleDict({name: Block(config, axis) for name in "01"})

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x

    def distribution(self, name):
        return Uniform(0.8)

def build(config, axis):
    return Network(config, axis)
"""


def verify(folder: str) -> list[list[dict[str, Any]]]:
    """Rows of each method, on the ranks that there are; on the first one then also in a process without a group."""
    import os
    import sys

    sys.path.insert(0, folder)
    from service.parallel import distributed

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = [_rows(Path(folder), rank, world)]
    distributed.stop()
    if rank == 0:
        launched = dict(os.environ)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        found.append(_rows(Path(folder), 0, 1))
        os.environ |= launched
    return found


def _rows(folder: Path, rank: int, world: int) -> list[dict[str, Any]]:
    from verify_jobs import context

    from service.jobs.files import DataLayout
    from service.jobs.spec.verify import VerifySpec
    from service.verification import job

    rows, model = [], {"family": "handwritten", "features": 4, "inner": 8}
    for index, (method, threshold) in enumerate((("alpha-crown", -50), ("beta-crown", -0.85), ("beta-crown", -0.5))):
        output = [{"coefficients": [1, 0, 0, 0], "threshold": threshold}]
        box = {"lower": [-0.3] * 4, "upper": [0.3] * 4, "output": output}
        fields = {
            "device": "cpu",
            "model": model,
            "property": {"box": box},
            "method": method,
            "parallel": {"tp": world},
        }
        data = DataLayout(folder / f"data-{world}")
        ranked, report = context(data, rank, world, job_id=f"job_{index:a>20}")
        job.run(VerifySpec.model_validate(fields), ranked)
        rows += report.bounds
    return rows


def test_a_family_of_an_installed_package_is_verified_as_on_one_rank(fresh_torchrun: Any, tmp_path: Path) -> None:
    package, information = tmp_path / "handwritten", tmp_path / "handwritten-1.0.dist-info"
    for folder in (package, information):
        folder.mkdir()
    for name, text in (("__init__", ""), ("declared", DECLARED), ("network", NETWORK)):
        (package / f"{name}.py").write_text(text)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: handwritten\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[trivet.models]\nhandwritten = handwritten.declared:FAMILY\n")
    # Packages are looked for when the service is imported.
    (divided, alone), _ = fresh_torchrun(verify, 2, folder=str(tmp_path))
    assert [row["verdict"] for row in divided] == ["verified", "verified", "falsified"]
    for row, expected in zip(divided, alone, strict=True):
        assert row["verdict"] == expected["verdict"]
        for end in ("lower", "upper"):
            assert row[end] == pytest.approx(expected[end], rel=2e-5, abs=1e-5)
