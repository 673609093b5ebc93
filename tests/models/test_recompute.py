"""Recomputation: the same gradients from less memory, and what each choice computes again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import MlpConfig, TransformerConfig
from service.models import FamilyConfig, build
from service.models.compiled import apply_compile
from service.models.parallelize import apply_activation_checkpoint
from service.parallel import mesh
from service.parallel.collectives import GroupError

TRANSFORMER = TransformerConfig(vocab_size=16, dim=16, layers=3, heads=4, kv_heads=2, ffn_dim=32, max_sequence=32)
MLP = MlpConfig(in_features=16, hidden=(32, 32, 32), out_features=4, activation="tanh")
CHOICES = ("none", "selective", "full")
MATMULS = ("aten::mm", "aten::bmm", "aten::addmm")


class Recorder(TorchDispatchMode):
    """Counts the operators that run and follows the memory of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._results: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.counts[function._schema.name] += 1
        results = function(*arguments, **(keywords or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
        for result in tree_leaves(results):
            # Views count as what they are views of, which may be a parameter.
            if isinstance(result, Tensor) and (storage := result.untyped_storage())._cdata not in given:
                self._results[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def bytes_alive(self) -> int:
        return sum(size for storage, size in self._results.values() if not storage.expired())

    def matmuls(self) -> int:
        return sum(self.counts[name] for name in MATMULS)

    def attentions(self) -> int:
        """Forward passes of attention, whatever the kernel."""
        return sum(
            count for name, count in self.counts.items() if "scaled_dot_product" in name and "backward" not in name
        )


@dataclass(frozen=True)
class Passes:
    forward: Recorder
    backward: Recorder
    alive: int
    """Bytes that the forward pass left for the backward pass."""
    gradients: dict[str, Tensor]


def inputs(config: FamilyConfig) -> Tensor:
    torch.manual_seed(0)
    if isinstance(config, TransformerConfig):
        return torch.randint(0, config.vocab_size, (4, 32))
    return torch.randn(64, 16, dtype=torch.float64)


def model(config: FamilyConfig, choice: Any) -> nn.Module:
    built = build(config, dtype=torch.float64, seed=2)
    if choice != "none":
        apply_activation_checkpoint(built, choice)
    return built


def gradients(built: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in built.named_parameters() if parameter.grad is not None}


def passes(config: FamilyConfig, choice: str) -> Passes:
    built, x = model(config, choice), inputs(config)
    forward, backward = Recorder(), Recorder()
    with forward:
        loss = built(x).square().mean()
    alive = forward.bytes_alive()
    with backward:
        loss.backward()
    return Passes(forward, backward, alive, gradients(built))


@pytest.fixture(scope="module", params=[TRANSFORMER, MLP], ids=["transformer", "mlp"])
def runs(request: pytest.FixtureRequest) -> dict[str, Passes]:
    return {choice: passes(request.param, choice) for choice in CHOICES}


def test_gradients_are_the_same(runs: dict[str, Passes]) -> None:
    wanted = runs["none"].gradients
    for choice in ("selective", "full"):
        found = runs[choice].gradients
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), choice


def test_each_choice_keeps_less_than_the_one_before() -> None:
    """Of a transformer: an MLP's block is one product and one function, between which nothing else could be freed."""
    none, selective, full = (passes(TRANSFORMER, choice).alive for choice in CHOICES)
    assert full < selective < none
    assert full < none / 2


def test_full_keeps_no_more_than_what_blocks_are_given() -> None:
    """Each further block costs one residual stream: 4 samples of 32 tokens of 16 float64."""
    deeper = TRANSFORMER.model_copy(update={"layers": 6})
    assert passes(deeper, "full").alive - passes(TRANSFORMER, "full").alive == 3 * 4 * 32 * 16 * 8


def test_selective_repeats_what_is_elementwise_and_no_product(runs: dict[str, Passes]) -> None:
    none, selective, full = (runs[choice].backward for choice in CHOICES)
    assert selective.matmuls() == none.matmuls() < full.matmuls()
    assert selective.attentions() == none.attentions() == 0
    assert full.attentions() == runs["full"].forward.attentions()
    activation = "aten::silu" if runs["none"].forward.counts["aten::silu"] else "aten::tanh"
    assert none.counts[activation] == 0
    assert selective.counts[activation] == full.counts[activation] == 3


def test_the_attention_of_this_machine_is_one_that_is_kept(runs: dict[str, Passes]) -> None:
    forward = runs["none"].forward
    assert forward.attentions() == (3 if forward.counts["aten::silu"] else 0)


@pytest.mark.parametrize("choice", ["selective", "full"])
def test_names_stay_and_blocks_of_a_kind_stay_of_a_kind(choice: Any) -> None:
    plain, own = model(TRANSFORMER, "none"), model(TRANSFORMER, choice)
    assert own.state_dict().keys() == plain.state_dict().keys()
    kinds = {type(block) for block in own.blocks.values()}
    assert len(kinds) == 1
    assert kinds == {type(block) for block in model(TRANSFORMER, choice).blocks.values()}
    assert all(isinstance(block, type(plain.blocks["0"])) for block in own.blocks.values())
    assert own.blocks["0"].attention.query.weight is not plain.blocks["0"].attention.query.weight
    assert type(build(TRANSFORMER).blocks["0"]) is type(plain.blocks["0"])


def test_without_gradients_nothing_is_kept() -> None:
    for choice in CHOICES:
        built, recorder = model(TRANSFORMER, choice), Recorder()
        with recorder, torch.no_grad():
            built(inputs(TRANSFORMER))
        assert recorder.bytes_alive() == 0, choice
        assert recorder.attentions() == 3


class Dropping(nn.Module):
    """A block that draws random numbers between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + dropout(self.second(dropout(self.first(x).relu(), 0.5)).tanh(), 0.5)


class Averaging(nn.Module):
    """A block that reads a mean which it updates."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + (self.first(x) * (1 + self.mean)).tanh()


class Two(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): kind() for index in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


@pytest.mark.parametrize("choice", ["selective", "full"])
@pytest.mark.parametrize("kind", [Dropping, Averaging])
def test_a_compiled_block_draws_and_updates_as_an_uncompiled_one(kind: type[nn.Module], choice: Any) -> None:
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        built, x = Two(kind), torch.randn(8, 16)
        apply_activation_checkpoint(built, choice)
        if compiled:
            built.compile(backend="aot_eager", fullgraph=True)
        built(x).square().mean().backward()
        found.append(gradients(built) | dict(built.named_buffers()))
    torch.testing.assert_close(found[1], found[0])


class Descending(Averaging):
    """Takes a gradient in its forward, for which it is recomputed once before the backward recomputes it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = super().forward(x).square().sum()
            (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * gradient


def test_a_block_that_takes_a_gradient_itself_is_recomputed_more_than_once() -> None:
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        built, x = Two(Descending).double(), torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
        if recomputed:
            apply_activation_checkpoint(built, "full")
        built(x).square().mean().backward()
        found.append(gradients(built) | dict(built.named_buffers()))
    torch.testing.assert_close(found[1], found[0])


def compiled_run(choice: str) -> tuple[dict[str, Tensor], int, int]:
    """Gradients, bytes that blocks keep, and how many graphs served them."""
    torch.compiler.reset()
    built, x = model(TRANSFORMER, choice), inputs(TRANSFORMER)
    counter = CompileCounterWithBackend("aot_eager")
    apply_compile(built, counter)
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage()._cdata for parameter in built.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = built(x).square().mean()
    loss.backward()
    return gradients(built), sum(kept.values()), counter.frame_count


@pytest.mark.slow
def test_compiled_blocks_recompute_from_one_graph_with_the_same_gradients() -> None:
    plain = passes(TRANSFORMER, "none").gradients
    found = {choice: compiled_run(choice) for choice in CHOICES}
    for choice, (own, _, graphs) in found.items():
        assert graphs == 1, choice
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-9, atol=1e-12)
    none, selective, full = (found[choice][1] for choice in CHOICES)
    assert full < selective < none


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["selective", "full"])
def test_a_divided_block_that_recomputes_is_still_one_graph(choice: Any) -> None:
    """Traced on a rank that is only planned: the collectives inside the repeated part need no group either."""
    planned = build(TRANSFORMER, mesh.plan(ParallelSpec(tp=2)))
    apply_activation_checkpoint(planned, choice)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    planned.compile(backend=counter, fullgraph=True)
    with pytest.raises(GroupError):  # traced and partitioned whole; only then does the first collective run
        planned(torch.zeros(2, 8, dtype=torch.int64))
    assert counter.frame_count == 1
