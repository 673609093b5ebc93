"""Make the files for a verification of your own: a small trained network in ONNX, and questions about it in VNN-LIB.

The network decides whether a vehicle brakes. It reads the gap to the vehicle ahead in metres and the speed at which
they approach each other in metres per second, and answers with two scores; the larger one wins. It learns the
rule to brake if less than two and a half seconds are left. The script writes these files into the folder
``own_network``, or into the folder named by its argument:

    brake.onnx      the network
    urgent.vnnlib   a gap of 5 to 20 m at 9 to 30 m/s: does it always brake?
    calm.vnnlib     a gap of 60 to 100 m at 0 to 5 m/s: does it never brake?
    crawl.vnnlib    a gap of 0.5 to 1.2 m at 0.5 to 5 m/s: does it always brake?
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

GAP, SPEED = (0.0, 100.0), (0.0, 40.0)
SECONDS = 2.5
QUESTIONS = {
    # ranges of gap and speed, and the score that wins in a counterexample: 0 keeps going, 1 brakes
    "urgent": ((5.0, 20.0), (9.0, 30.0), 0),
    "calm": ((60.0, 100.0), (0.0, 5.0), 1),
    "crawl": ((0.5, 1.2), (0.5, 5.0), 0),
}


def train() -> nn.Sequential:
    """Return the network, trained on samples of the rule in float32; the same in every run on one machine."""
    torch.manual_seed(0)
    low = torch.tensor([GAP[0], SPEED[0]])
    span = torch.tensor([GAP[1], SPEED[1]]) - low
    samples = low + span * torch.rand(4096, 2)
    brakes = (samples[:, 0] < SECONDS * samples[:, 1]).long()
    first = nn.Linear(2, 32)
    network = nn.Sequential(first, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    scaled = (samples - low) / span
    for _ in range(400):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(network(scaled), brakes))
        optimizer.step()
    with torch.no_grad():  # the first layer takes metres and metres per second from here on
        first.weight.div_(span)
        first.bias.sub_(first.weight @ low)
    return network


def to_onnx(network: nn.Sequential) -> onnx.ModelProto:
    """Return the network as ONNX, a Gemm for each linear layer."""
    nodes, constants, value = [], [], "input"
    for index, layer in enumerate(network):
        output = "scores" if index == len(network) - 1 else f"value_{index}"
        if isinstance(layer, nn.Linear):
            weight, bias = f"weight_{index}", f"bias_{index}"
            constants.append(numpy_helper.from_array(layer.weight.detach().numpy(), weight))
            constants.append(numpy_helper.from_array(layer.bias.detach().numpy(), bias))
            nodes.append(helper.make_node("Gemm", [value, weight, bias], [output], transB=1))
        else:
            nodes.append(helper.make_node("Relu", [value], [output]))
        value = output
    graph = helper.make_graph(
        nodes,
        "brake",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 2])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def query(gap: tuple[float, float], speed: tuple[float, float], wins: int) -> str:
    """Return VNN-LIB that asks for an input in the box at which the score ``wins`` is at least the other one."""
    lines = [f"(declare-const {name} Real)" for name in ("X_0", "X_1", "Y_0", "Y_1")]
    for name, (low, high) in (("X_0", gap), ("X_1", speed)):
        lines += [f"(assert (>= {name} {low}))", f"(assert (<= {name} {high}))"]
    lines.append(f"(assert (>= Y_{wins} Y_{1 - wins}))")
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    """Write the network and its questions into a folder, and print their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(to_onnx(train()), folder / "brake.onnx")
    for name, (gap, speed, wins) in QUESTIONS.items():
        (folder / f"{name}.vnnlib").write_text(query(gap, speed, wins))
    print(*sorted(str(path) for path in folder.iterdir()), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("own_network"))
