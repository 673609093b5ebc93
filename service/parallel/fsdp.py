"""Data parallelism by sharding parameters, gradients and optimizer state (FSDP2, ``fully_shard``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from service.jobs.spec.arithmetic import DTYPES, DtypeName, PrecisionSpec
from service.jobs.spec.train import ShardingSpec
from service.parallel.collectives import resolve
from service.parallel.mesh import Mesh
from service.parallel.tensor.placement import check_replaceable
from service.torch_internals.table import internal_of


def torch_dtype(name: DtypeName) -> torch.dtype:
    """Return torch's type of the name that a spec has for it."""
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


@dataclass(frozen=True)
class Precision:
    """The types of gathered parameters and activations, and of the gradient reduction; ``None`` keeps theirs."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None

    @staticmethod
    def from_spec(spec: PrecisionSpec) -> Precision:
        param = torch_dtype(spec.param)
        own = param is torch.float32
        return Precision(None if own else param, None if own and spec.reduce == "fp32" else torch_dtype(spec.reduce))


def apply_fsdp(
    model: nn.Module,
    mesh: Mesh,
    precision: Precision = Precision(),
    reshard: bool = True,
    units: Iterable[nn.Module] | None = None,
) -> nn.Module:
    """Shard a model, or a stage of one, over the mesh's data-parallel dimensions: each unit, then what remains.

    ``units`` are modules that the model calls as a whole; its blocks when absent.

    Gradients are *summed* over all data-parallel ranks, so the loss is divided by the global number of samples before
    its backward: then every layout has the gradients of one process. ``reshard`` frees gathered parameters after
    each forward; pipelines and gradient accumulation gather less often without it. Parameters that are DTensors
    over ``tp`` become DTensors over both meshes. Without a group nothing can be sharded; only full precision is
    accepted then. Raises ``ValueError`` for a parameter that cannot be sharded.
    """
    if mesh.shard_mesh is None:
        if precision != Precision():
            raise ValueError(f"{precision} needs a launched group: FSDP casts the parameters")
        return model
    _check_parameters(model)
    # FSDP adds micro-batches up in its type of reduction: float32. _GradientExchange has the one asked for.
    accumulated = None if precision.reduce is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=precision.param, reduce_dtype=accumulated)
    if units is None:
        blocks = getattr(model, "blocks", None)
        units = blocks.values() if isinstance(blocks, nn.ModuleDict) else ()
    units = tuple(units)
    _check_apart(model, units)
    for unit in units:
        fully_shard(unit, mesh=mesh.shard_mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The root's own parameters are needed again at once in the backward, so they stay gathered.
    fully_shard(model, mesh=mesh.shard_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Plain SUM: gloo has no average, and a factor of 1 needs no scaled sum from NCCL either.
            module.set_force_sum_reduction_for_comms(True)
            if precision.reduce != accumulated:
                module.set_custom_reduce_scatter(_GradientExchange(precision.reduce))  # type: ignore[arg-type]
    return model


class _GradientExchange:
    """Sums gradients over ranks in ``dtype``: FSDP casts what it copies into the buffers that this allocates."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=self._dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def _check_parameters(model: nn.Module) -> None:
    """Raise ``ValueError`` for a parameter without dimensions, and for what FSDP's parameters would leave behind."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ValueError(
                f"the parameter {name!r} has no dimension to divide over parallel.dp_shard and dp_replicate, or to "
                "cast to precision.param; make it of shape (1,), as torch.ones(1) is, or train on one rank in fp32"
            )
    check_replaceable(model, "the parameters of parallel.dp_shard, dp_replicate and precision")


def _check_apart(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise ``ValueError`` for a parameter of two units, or of one and what remains."""
    inside = [{id(module) for module in unit.modules()} for unit in units]
    owners: dict[int, int] = {}
    for number, unit in enumerate(units):
        for parameter in unit.parameters():
            other = owners.setdefault(id(parameter), number)
            if id(unit) not in inside[other] and id(units[other]) not in inside[number]:
                raise _shared(model, parameter)
    for module in model.modules():
        if not any(id(module) in modules for modules in inside):
            for parameter in module.parameters(recurse=False):
                if id(parameter) in owners:
                    raise _shared(model, parameter)


def _shared(model: nn.Module, parameter: nn.Parameter) -> ValueError:
    """Return the error of a parameter in parts that are gathered apart."""
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if each is parameter]
    return ValueError(
        f"the parameters {' and '.join(map(repr, names))} are one, in parts that FSDP gathers apart; give each part "
        "its own, or train with parallel.dp_shard and dp_replicate 1 and precision in fp32"
    )


def synchronize_gradients(model: nn.Module, is_last: bool) -> None:
    """Call before each backward of an optimizer step: gradients are reduced in the last one only.

    Until then they add up unsharded, and parameters stay gathered after a backward. A model that FSDP does not manage
    needs nothing.
    """
    _set_backward(model, reduce=is_last, free=is_last)


def before_backward(sharding: ShardingSpec) -> Callable[[nn.Module, bool], None]:
    """Return what to call before each backward once ``sharding`` is settled: with the model, and if it is the last."""
    if sharding.reduce == "last":
        return synchronize_gradients
    return lambda model, is_last: _set_backward(model, reduce=True, free=is_last or sharding.reshard == "always")


def _set_backward(model: nn.Module, *, reduce: bool, free: bool) -> None:
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(reduce)
        model.set_requires_gradient_sync(reduce)
        model.set_reshard_after_backward(free)


def free_parameters(model: nn.Module) -> None:
    """Free gathered parameters, which an evaluation leaves if micro-batches keep them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def absorb_gradients(model: nn.Module) -> None:
    """Call after weight gradients were added outside a backward pass.

    FSDP adds up in float32, but looks at gradients only at the end of a backward.
    """
    for group in _parameter_groups(model):
        _absorb(group.fsdp_params)


def _absorb(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def reduce_gradients(model: nn.Module) -> None:
    """Start to reduce the gradients that are complete although no backward is running; then free the parameters."""
    synchronize_gradients(model, is_last=True)
    for group in _parameter_groups(model):
        group.post_backward()


def await_gradients(model: nn.Module) -> None:
    """Let the current stream wait for :func:`reduce_gradients`, and FSDP end its step."""
    if isinstance(model, FSDPModule):
        internal_of(_state(model), f"{_STATE}._root_post_backward_final_callback")()


def is_static(model: nn.Module) -> bool:
    """Return whether a model says that each forward, on every rank and for all samples, calls every block, uses every
    parameter, and draws random numbers from torch alone.
    """
    says: bool = getattr(model, "is_static", False)
    return says


def check_only_read(model: nn.Module) -> None:
    """Call after a step. Raises ``ValueError`` for a parameter to which the model's own forward writes: FSDP gathers a
    copy, and what is written to that is lost. A write to ``parameter.data`` cannot be seen.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in _parameter_groups(model):
        for each in group.fsdp_params:
            if hasattr(each, "unsharded_param") and each.unsharded_param._version:  # FSDP's own writes keep it at 0
                name = names[id(each.sharded_param)]
                raise ValueError(
                    f"the forward writes to the parameter {name!r}, as an embedding with max_norm does; copies that "
                    "parallel.dp_shard, dp_replicate and precision gather lose that; expected a forward that only "
                    "reads it, or one rank in fp32"
                )


class PartlyUsed:
    """A sharded model some of whose parameters a step may leave out, not the same ones on every rank, as a layer that
    is skipped at random or an expert that gets no sample: ranks would add up gradients of different parameters, or wait
    for each other for ever. Those that a rank leaves out take part with zeros.
    """

    def __init__(self, model: nn.Module, group: str) -> None:
        self._groups, self._group = _parameter_groups(model), group
        self._used: set[int] = set()
        for each in self._groups:
            each.post_backward = self._filling(each, each.post_backward)

    def settle(self) -> None:
        """Call after the backwards of a step, on all ranks of the group: a parameter that none has used has no
        gradient, as in one process.
        """
        parameters = [each.sharded_param for group in self._groups for each in group.fsdp_params]
        used = torch.tensor([id(each) in self._used for each in parameters], dtype=torch.int32)
        self._used.clear()
        if not parameters:
            return
        used = used.to(parameters[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=resolve(self._group))
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None

    def _filling(self, group: Any, post_backward: Callable[..., None]) -> Callable[..., None]:
        def filled(*arguments: Any) -> None:
            gathered = [each for each in group.fsdp_params if hasattr(each, "unsharded_param")]
            if any(each.unsharded_accumulated_grad is not None for each in gathered):
                _absorb(gathered)  # those that only the last micro-batch used are in another type
            there = [each for each in gathered if _gradient(each) is not None]
            self._used.update(id(each.sharded_param) for each in there)
            if group.reduce_grads:
                for each in gathered:
                    if each.sharded_param.requires_grad and _gradient(each) is None:
                        _fill(each, there)
            post_backward(*arguments)

        return filled


def _gradient(parameter: Any) -> Tensor | None:
    """Return the unsharded gradient, of the last backward or of all since the last reduction."""
    added = parameter.unsharded_accumulated_grad
    found: Tensor | None = parameter.unsharded_param.grad if added is None else added
    return found


def _fill(parameter: Any, there: Sequence[Any]) -> None:
    """Give a parameter zeros in the form in which the others have their gradients."""
    whole = parameter.unsharded_param
    if added := [each.unsharded_accumulated_grad for each in there if each.unsharded_accumulated_grad is not None]:
        parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=added[0].dtype)
    else:
        whole.grad = torch.zeros_like(whole)


_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"


def _state(module: FSDPModule) -> Any:
    return internal_of(module, "torch.distributed.fsdp.FSDPModule._get_fsdp_state")()


def _parameter_groups(model: nn.Module) -> list[Any]:
    """Return FSDP's bookkeeping of each sharded module, last module first as in a backward; a plain model has none.

    FSDP2 has no public call for a reduction outside of a backward. ``torch.distributed.pipelining`` makes the same
    private ones; torch 2.11 has one group per module, 2.13 a list.
    """
    groups: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = _state(module)
            listed = getattr(state, "_fsdp_param_groups", None)
            groups += [internal_of(state, f"{_STATE}._fsdp_param_group")] if listed is None else listed
    return [group for group in reversed(groups) if group is not None]
