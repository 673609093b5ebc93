"""Handles copies to the host: on a device that is the host itself they copy nothing, on a CUDA device they always do.

A copy that does not wait (``non_blocking``) is one too: it is queued on the stream before the replays that come after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from service.compilation.instruments.functions import FunctionCall
from service.parallel.boundary.lifetimes import address_of
from service.torch_internals.table import internal

HOST = "cpu"
_ALWAYS = frozenset({"cpu", "numpy", "__array__"})
_BY_ARGUMENT = frozenset({"to", "type", "as_tensor", "asarray"})


@torch.library.custom_op("trivet::copy_to_host", mutates_args=())
def _copy_to_host(x: Tensor) -> Tensor:
    """Copy to the host: in a graph, the place of a transfer that the host's own compiler would leave out."""
    return x.clone()


@_copy_to_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_copy_to_host.register_autograd(lambda context, gradient: gradient)


class Transfers:
    """Gives transfers to the host memory of their own, if they begin ``on_device``.

    ``device`` stands for the program's; tensors sent to it, or to another tensor's device, stay where they are. Only
    the object itself tells that device from the host: ``"cpu"``, or ``torch.device("cpu")`` made anew, is the host.
    """

    def __init__(self, device: torch.device, on_device: Callable[[Tensor], bool]) -> None:
        self.on_device = on_device
        self._own: dict[int, torch.device] = {id(device): device}

    def run(self, call: FunctionCall) -> Any:
        """Make the call, with a copy if a CUDA device would make one."""
        result = call.run()
        if isinstance(result, torch.device) and call.name == "__get__":
            self._own[id(result)] = result
            return result
        source = next((each for each in call.arguments[:1] if isinstance(each, Tensor)), None)
        if source is None or not self._to_host(call) or not self.on_device(source):
            return result
        if not isinstance(result, Tensor):
            return result.copy()
        return result.clone() if address_of(result) == address_of(source) else result

    def _to_host(self, call: FunctionCall) -> bool:
        if call.name in _ALWAYS:
            return True
        if call.name not in _BY_ARGUMENT:
            return False
        places = [call.named.get("device"), *call.arguments[1:2], call.named.get("dtype")]
        return any(self._is_host(place) for place in places)

    def _is_host(self, place: Any) -> bool:
        if isinstance(place, torch.device):
            return place.type == HOST and id(place) not in self._own
        return isinstance(place, str) and (place.split(":")[0] == HOST or place in _HOST_TYPES)


_HOST_TYPES = frozenset(
    f"torch.{kind}Tensor" for kind in ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Bool")
)
"""Legacy names of types, which ``Tensor.type`` takes: those of a CUDA device begin with ``torch.cuda``."""


def with_transfers(graph: fx.GraphModule) -> fx.GraphModule:
    """Return ``graph``, as Dynamo gives it to a backend, with its transfers to the host as operators of their own.

    Here a device object is the program's own: only ``cpu()`` and names of the host are transfers.
    """
    fake = internal("torch._subclasses.fake_tensor.FakeTensor")
    for node in graph.graph.nodes:
        # Other kinds of tensors, such as distributed ones, do not know the operator.
        is_plain = isinstance(node.meta.get("example_value"), fake)
        if is_plain and node.op == "call_method" and _is_transfer(node):
            with graph.graph.inserting_after(node):
                copy = graph.graph.call_function(torch.ops.trivet.copy_to_host.default, (node,))
            copy.meta.update(node.meta)
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    graph.recompile()
    return graph


def _is_transfer(node: fx.Node) -> bool:
    if node.target != "to":
        return node.target == "cpu"
    places = (node.kwargs.get("device"), *node.args[1:2])
    return any(isinstance(place, str) and place.split(":")[0] == HOST for place in places)


def on_host(graph: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the nodes of ``graph``, as AOTAutograd lowers it, whose values are copies on the host, or derived from
    these.
    """
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.target is torch.ops.trivet.copy_to_host.default or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)
