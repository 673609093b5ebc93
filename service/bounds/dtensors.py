"""Traces modules that torch's ``parallelize_module`` divided as computations on this rank's parts.

The hooks of its layers make DTensors of their inputs, and plain tensors of their results. While such a module is
traced, stand-ins take the DTensors' place: functions with a rule run on the parts, and each change of placements leaves
one of our collectives. Placements are what the module says of a tensor, never guessed from its shape; what has no
rule is refused, by name and placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from service.bounds.graph import UnsupportedModelError
from service.parallel import collectives
from service.torch_internals.table import internal

_INSTEAD = "let it compute on local tensors (use_local_output=True), or redistribute its DTensors to Replicate() before"


def stand_ins(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a module's ``state``, this rank's parts, with stand-ins for parameters and buffers that are DTensors."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: _StandIn(part, whole.device_mesh, whole.placements, whole.shape)
        if isinstance(whole := held.get(name), DTensor)
        else part
        for name, part in state.items()
    }


def plain(result: Any) -> Any:
    """Return a module's result as a plain tensor if it is a DTensor that every rank has whole."""
    if not isinstance(result, _StandIn):
        return result
    if result.placement != Replicate():
        raise UnsupportedModelError(f"the model returns {result!r}: let it return full_tensor()")
    return result.part


@contextmanager
def stood_in() -> Iterator[None]:
    """Let DTensors that a module makes of its own tensors be stand-ins meanwhile."""
    with patch.object(DTensor, "from_local", _of_part):
        yield


def _of_part(
    part: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: torch.Size | None = None,
    **_: Any,
) -> DTensor:
    """Return ``DTensor.from_local`` of these arguments: without a ``shape``, parts are of one size."""
    if run_check:
        raise UnsupportedModelError("DTensor.from_local with run_check=True asks other ranks; expected False")
    if device_mesh is None:
        raise UnsupportedModelError("DTensor.from_local has no device_mesh; expected that of the tensor-parallel ranks")
    spread = placements or (Replicate(),) * device_mesh.ndim
    if shape is None:
        lengths = list(part.shape)
        for dimension, each in enumerate(spread):
            if isinstance(each, Shard):
                lengths[each.dim] *= device_mesh.size(dimension)
        shape = torch.Size(lengths)
    return _StandIn(part, device_mesh, spread, shape)


class _StandIn(DTensor):
    """Stands for a DTensor of a traced module: this rank's ``part`` of it, over a ``mesh``.

    It has the shape of the whole. The mesh has one dimension, unless the module only asks for its part.
    """

    part: Tensor
    mesh: DeviceMesh
    spread: tuple[Placement, ...]

    @staticmethod
    def __new__(cls, part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> _StandIn:
        make: Any = internal("torch.Tensor._make_wrapper_subclass")
        made: _StandIn = make(cls, shape, dtype=part.dtype, device=part.device)
        return made

    def __init__(self, part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> None:
        self.part, self.mesh = part, mesh
        self.spread = tuple(_counted_from_first(each, len(shape)) for each in placements)

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.spread

    @property
    def placement(self) -> Placement:
        """Return the placement over the one dimension of the mesh, if it has a rule."""
        if len(self.spread) != 1:
            raise UnsupportedModelError(
                f"a DTensor over {self.mesh}: expected a mesh of one dimension, such as mesh['tp'] of a larger one"
            )
        (found,) = self.spread
        if type(found) not in (Replicate, Shard, Partial):
            raise UnsupportedModelError(f"a DTensor with {found}: expected Replicate(), Shard(dim) or Partial()")
        if isinstance(found, Shard) and self.shape[found.dim] % self.mesh.size():
            raise UnsupportedModelError(
                f"a DTensor of {tuple(self.shape)} with {found} over {self.mesh.size()} ranks: expected parts of one "
                f"size, a dimension {found.dim} that divides by {self.mesh.size()}"
            )
        return found

    def to_local(self, **_: Any) -> Tensor:
        return self.part

    def full_tensor(self, **_: Any) -> Tensor:
        return self.redistribute(placements=[Replicate()]).to_local()

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Change the placement by one of our collectives, or two of them for what torch does in one."""
        if device_mesh not in (None, self.mesh) or options.get("forward_dtype"):
            raise UnsupportedModelError("redistribute to another mesh or type cannot be bounded; expected placements")
        asked = _StandIn(self.part, self.mesh, placements or [Replicate()] * len(self.spread), self.shape)
        if self.placement != asked.placement:
            asked.part = _moved(self, self.placement, asked.placement)
        return asked

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"a DTensor {list(self.shape)} with {', '.join(map(str, self.spread))}"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function by its rule."""
        if (rule := _RULES.get(function)) is not None:
            return rule(function, *arguments, **(named or {}))
        if function not in _ASKED:
            _refuse(function, arguments)
        with internal("torch._C.DisableTorchFunctionSubclass")():
            return function(*arguments, **(named or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse an operation that a function without a rule has come to."""
        _refuse(func, args)


def _counted_from_first(placement: Placement, dimensions: int) -> Placement:
    return Shard(placement.dim % dimensions) if type(placement) is Shard else placement


def _moved(tensor: _StandIn, before: Placement, after: Placement) -> Tensor:
    """Return this rank's part under another placement."""
    name, size = tensor.mesh.get_group().group_name, tensor.mesh.size()
    part = tensor.part
    if isinstance(before, Partial):
        if before.reduce_op not in {"sum", "avg"}:
            raise UnsupportedModelError(f"a DTensor with {before}: expected 'sum' or 'avg'")
        part = part / size if before.reduce_op == "avg" else part
        if isinstance(after, Shard):
            return collectives.reduce_scatter_to_group(part, after.dim, name, size)
        if isinstance(after, Replicate):
            return collectives.reduce_from_group(part, name)
    whole = collectives.gather_from_group(part, before.dim, name, size) if isinstance(before, Shard) else part
    if isinstance(after, Shard):
        return collectives.scatter_to_group(whole, after.dim, name, size)
    if isinstance(after, Replicate):
        return whole
    raise UnsupportedModelError(f"redistribute from {before} to {after} cannot be bounded; leave the tensor as it is")


def _refuse(function: Any, arguments: Sequence[Any]) -> NoReturn:
    placed = ", ".join(repr(each) if isinstance(each, _StandIn) else type(each).__name__ for each in arguments)
    name = getattr(function, "__qualname__", None) or str(function)
    raise UnsupportedModelError(f"{name}({placed}) cannot be bounded: {_INSTEAD}")


def _with(tensor: _StandIn, part: Tensor, placement: Placement, *last: int) -> _StandIn:
    """Return a result whose shape is that of ``tensor`` but for the ``last`` lengths."""
    shape = (*tensor.shape[: tensor.dim() - len(last)], *last)
    return _StandIn(part, tensor.mesh, [placement], torch.Size(shape))


def _linear(function: Any, x: Any, weight: Any, bias: Any = None) -> _StandIn:
    """A weight with Shard(0) is a column-parallel layer; one with Shard(1) a row-parallel layer, whose result is
    partial, with the bias in equal parts.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    if not all(isinstance(each, _StandIn) for each in given):
        _refuse(function, given)
    last, added = x.dim() - 1, None if bias is None else bias.part
    kinds = (x.placement, weight.placement, Replicate() if bias is None else bias.placement)
    after: Placement
    if kinds[:2] == (Replicate(), Shard(0)) and (bias is None or kinds[2] == Shard(0)):
        after = Shard(last)
    elif kinds == (Shard(last), Shard(1), Replicate()):
        after, added = Partial(), None if added is None else added / x.mesh.size()
    elif kinds[1:] == (Replicate(), Replicate()) and kinds[0] not in (Shard(last), Partial(), Partial("avg")):
        after = kinds[0]
    else:
        _refuse(function, given)
    return _with(x, function(x.part, weight.part, added), after, weight.shape[0])


def _normalised(function: Any, x: Any, normalized_shape: Sequence[int], *rest: Any, **named: Any) -> _StandIn:
    """Each entry of the first dimensions is normalised by itself."""
    parameters = [each for each in (*rest, *named.values()) if isinstance(each, Tensor)]
    placed = all(isinstance(each, _StandIn) and each.placement == Replicate() for each in parameters)
    if not (placed and isinstance(x, _StandIn)):
        _refuse(function, (x, *parameters))
    inner = x.dim() - len(normalized_shape)
    if x.placement != Replicate() and not (isinstance(x.placement, Shard) and x.placement.dim < inner):
        _refuse(function, (x, *parameters))
    own = [_part(each) for each in rest]
    return _with(x, function(x.part, normalized_shape, *own, **{n: _part(v) for n, v in named.items()}), x.placement)


def _pointwise(function: Any, *arguments: Any, **named: Any) -> _StandIn:
    """Work on entries alone, of tensors that are placed alike and have one shape, or of one tensor and numbers."""
    tensors = [each for each in (*arguments, *named.values()) if isinstance(each, Tensor)]
    placed = [each for each in tensors if isinstance(each, _StandIn)]
    first = placed[0]
    alike = all((each.shape, each.placement) == (first.shape, first.placement) for each in placed)
    if len(placed) < len(tensors) or isinstance(first.placement, Partial) or not alike:
        _refuse(function, arguments)
    return _with(first, function(*map(_part, arguments), **{n: _part(v) for n, v in named.items()}), first.placement)


def _part(value: Any) -> Any:
    return value.part if isinstance(value, _StandIn) else value


_POINTWISE = (
    *(functional.relu, functional.gelu, functional.silu, functional.leaky_relu, functional.elu, functional.softplus),
    *(functional.sigmoid, functional.tanh, functional.dropout, functional.hardtanh, functional.hardswish),
    *(torch.relu, torch.sigmoid, torch.tanh, torch.add, torch.sub, torch.mul, torch.neg),
    *(Tensor.relu, Tensor.sigmoid, Tensor.tanh, Tensor.add, Tensor.sub, Tensor.mul, Tensor.neg),
)
_RULES: Mapping[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.layer_norm: _normalised,
    functional.rms_norm: _normalised,
    **dict.fromkeys(_POINTWISE, _pointwise),
}
_PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_meta", "is_cpu", "is_cuda")
_ASKED = frozenset(
    {
        *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex),
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    }
)
"""Functions that only ask what a tensor is."""
