"""Traverse a network forward, layer by layer: the counterpart of :mod:`service.bounds.linear.traversal`."""

from __future__ import annotations

from dataclasses import dataclass

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.network import Network


@dataclass(eq=False)
class ForwardTraversal:
    """Bound every value of a network in execution order, in ``intervals``, which begin with the input's.

    What a non-linear node reads decides on its relaxation: before the first one that reads a value, its bounds are made
    equal to the last bit on all ranks that have it, and refined. As it is, this is interval bound propagation (Gowal et
    al., 2018); subclasses say what else is done at each layer.
    """

    network: Network
    intervals: dict[str, Interval]

    def run(self) -> None:
        """Bound all values. All ranks that have a part of the network call it."""
        reached = set[str]()
        for node in self.network.graph.nodes[1:]:
            if node.name in self.network.relaxed:
                for index, name in enumerate(node.inputs):
                    if name not in reached:
                        reached.add(name)
                        self.intervals[name] = self.network.agreed(name, self.intervals[name])
                        self.refine(node, index)
                self.relax(node)
            self.intervals[node.name] = self.propagate(node)

    def refine(self, node: Node, index: int) -> None:
        """Tighten the bounds of an input of ``node``, the first non-linear node that reads it.

        Subclasses do so by rows of backward passes, for the entries on which the relaxation depends:
        :mod:`service.bounds.methods.layers` by rows that may differ among instances, also in place of the interval;
        :mod:`service.bounds.rigorous.method` by common rows, each used only by the instances that want it, so that
        bounds do not depend on the batch; :mod:`service.bounds.affine_forward` by a few common rows that all instances
        use, beside their affine forms.
        """

    def relax(self, node: Node) -> None:
        """Relax a non-linear node on the bounds of its inputs, for passes from later layers."""

    def propagate(self, node: Node) -> Interval:
        """Return bounds of a node's value, by those of its inputs."""
        return self.network.interval(node, self.intervals)

    def bounds_of_inputs(self, node: Node) -> list[Interval]:
        """Return the bounds of what a node reads, in the order of its inputs."""
        return [self.intervals[name] for name in node.inputs]


def values_of_a_ball(network: Network, box: Interval) -> frozenset[str]:
    """Return the values of which the box around a ball of inputs would lose something that a linear pass keeps.

    They are those that the first non-linear node reads; there are none where the input is a box.
    """
    is_ball = bool(network.nonlinear) and not box.exact_layers
    return frozenset(network.nonlinear[0].inputs) - {network.graph.input.name} if is_ball else frozenset()
