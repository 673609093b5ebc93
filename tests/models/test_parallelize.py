"""The compile check certifies exactly what training applies: one function, and the same modules for every recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from service.compilation.program import target
from service.models import parallelize
from service.training import setup

MODEL = {"family": "transformer", "dim": 16, "layers": 2, "heads": 2, "kv_heads": 2, "vocab_size": 32}
PARALLEL = ({"dp_shard": 2}, {"tp": 2}, {"pp": 2})
OPTIONS: dict[str, tuple[Any, ...]] = {
    "activation_checkpoint": ("none", "selective", "full"),
    "precision": tuple({"param": param, "float8": float8} for param in ("fp32", "bf16") for float8 in (False, True)),
    "sharding": ({"reshard": "always"}, {"reshard": "never"}),
}
MODES = (None, "aot_eager")


def test_training_and_the_compile_check_apply_the_same_function() -> None:
    assert setup.parallelize is target.parallelize is parallelize.parallelize
    assert setup.ModelRecipe is target.ModelRecipe is parallelize.ModelRecipe


def structure_of(module: Any) -> Iterator[list[str]]:
    """All that the recipe may change of a module and of those within, as text."""
    from torch.distributed.fsdp import FSDPModule

    for name, part in module.named_modules():
        product_of = getattr(part, "product", None)
        compiled = "" if part._compiled_call_impl is None else "compiled"
        sharding = ""
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            sharding = f"{[(each.mp_policy, each.post_forward_mesh_info) for each in groups if each is not None]}"
        yield [name, type(part).__name__, getattr(product_of, "__name__", ""), sharding.split(" at 0x")[0], compiled]
    for name, value in module.named_parameters():
        placements = str(getattr(value, "placements", ""))
        yield [name, type(value).__name__, str(value.dtype), str(tuple(value.shape)), placements]


def compare_structures(folder: str, one_of: int) -> Any:
    """On each rank, the recipes for which the two jobs have other modules; how many were compared, and differ."""
    import torch
    import torch.distributed as dist

    from service.compilation.program import target
    from service.compilation.run import built_program
    from service.compilation.rungs import RUNGS
    from service.jobs.files import DataLayout
    from service.jobs.runtime import NullReporter, RunContext
    from service.jobs.spec.compile import CompileSpec
    from service.jobs.spec.train import TrainSpec
    from service.models.data import Dataset, Split
    from service.models.registry import outline
    from service.parallel import distributed
    from service.parallel import mesh as meshes
    from service.parallel.tensor import float8
    from service.training import setup

    float8._check = lambda name, weight: None  # type: ignore[assignment]  # nothing is computed here
    device = distributed.start("cpu")
    rank = dist.get_rank()
    context = RunContext("job_" + "0" * 20, 1, rank, rank, 2, "cpu", DataLayout(Path(folder)), NullReporter(), bool)
    tokens = torch.zeros(8, 16, dtype=torch.long)
    dataset = Dataset(Split(tokens, tokens), Split(tokens, tokens), "zeros")
    differing, compared = [], set()
    recipes = [*product(PARALLEL, *OPTIONS.values())][::one_of]
    for parallel, *values in recipes:
        common = {"model": MODEL, "parallel": parallel, **dict(zip(OPTIONS, values, strict=True))}
        train = TrainSpec.model_validate({**common, "data": {"source": "tokens"}, "steps": 1, "batch": {"global": 8}})
        check = CompileSpec.model_validate({**common, "shapes": [2], "steps": 2})
        program = target.target_of(check, context, device).program
        mesh = meshes.build(train.parallel, "cpu")
        for mode in MODES:
            modes: Any = {"train": mode} if mode else {}
            inputs = setup.TrainingInputs(
                outline(train.model, mesh.tp), dataset, modes, setup.ModelRecipe.from_spec(train)
            )  # type: ignore[arg-type]
            stages = setup.assemble(train, context, device, mesh, inputs).stages
            run = built_program.build(program, "train", RUNGS[mode] if mode else None)
            trained = [list(structure_of(stage)) for stage in stages.values()]
            checked = [list(structure_of(module)) for module in run.parts.modules.values()]
            compared.add(str(trained))
            if trained != checked:
                differing.append(f"{common} {mode}: {trained} {checked}"[:4000])
    distributed.stop()
    return differing[:2], len(recipes) * len(MODES), len(compared)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("one_of", [7, pytest.param(1)])
def test_every_combination_of_options_is_checked_as_it_is_trained(
    torchrun: Callable[..., list[Any]], tmp_path: Path, one_of: int
) -> None:
    """All of them, or one of seven, which is prime to the number of each option's values."""
    for differing, compared, distinct in torchrun(compare_structures, 2, folder=str(tmp_path), one_of=one_of):
        assert not differing
        assert compared >= 144 // one_of
        assert distinct > compared // 2  # without FSDP, its options change nothing
