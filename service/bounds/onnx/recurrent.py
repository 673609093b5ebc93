"""Converters of recurrent layers: the cell, as often as the sequence is long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.operators.conversion import Call, Converted, Converter, Shape, Value, Values, optional

State = tuple[Tensor, ...]
"""Hidden values ``(…, batch, hidden)``, and those of the cell of an LSTM."""
_DEFAULTS: Mapping[str, Sequence[str]] = {
    "LSTM": ("sigmoid", "tanh", "tanh"),
    "GRU": ("sigmoid", "tanh"),
    "RNN": ("tanh",),
}
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "softplus": functional.softplus,
    "softsign": lambda x: x / (1 + x.abs()),
}
_OF_TWO_NUMBERS: Mapping[str, tuple[float, float, Callable[[Tensor, float, float], Tensor]]] = {
    "affine": (1.0, 0.0, lambda x, alpha, beta: alpha * x + beta),
    "elu": (1.0, 0.0, lambda x, alpha, _: functional.elu(x, alpha)),
    "hardsigmoid": (0.2, 0.5, lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1)),
    "leakyrelu": (0.01, 0.0, lambda x, alpha, _: functional.leaky_relu(x, alpha)),
    "scaledtanh": (1.0, 1.0, lambda x, alpha, beta: alpha * torch.tanh(beta * x)),
}
"""Activations with ``activation_alpha`` and ``activation_beta``, after the numbers that hold without them."""
_WITH_BETA = frozenset({"affine", "hardsigmoid", "scaledtanh"})


@dataclass(frozen=True, eq=False)
class _Weights:
    """Holds those of one direction: ``(gates · hidden, inputs)``, ``(gates · hidden, hidden)``, both biases or none."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    activations: Sequence[Callable[[Tensor], Tensor]]


def lstm(weights: _Weights, x: Tensor, state: State) -> State:
    gate, cell_gate, output = weights.activations
    h, c = state
    sums = functional.linear(x, weights.input, weights.input_bias) + functional.linear(
        h, weights.hidden, weights.hidden_bias
    )
    i, o, f, new = sums.chunk(4, dim=-1)
    c = gate(f) * c + gate(i) * cell_gate(new)
    return gate(o) * output(c), c


def rnn(weights: _Weights, x: Tensor, state: State) -> State:
    (activation,) = weights.activations
    sums = functional.linear(x, weights.input, weights.input_bias)
    return (activation(sums + functional.linear(state[0], weights.hidden, weights.hidden_bias)),)


def gru(weights: _Weights, x: Tensor, state: State) -> State:
    """Reset the hidden values after their matrix, as torch does (``linear_before_reset`` 1)."""
    gate, activation = weights.activations
    given = functional.linear(x, weights.input, weights.input_bias).chunk(3, dim=-1)
    kept = functional.linear(state[0], weights.hidden, weights.hidden_bias).chunk(3, dim=-1)
    update, reset = gate(given[0] + kept[0]), gate(given[1] + kept[1])
    new = activation(given[2] + reset * kept[2])
    return (new + update * (state[0] - new),)


def gru_of_reset(weights: _Weights, x: Tensor, state: State) -> State:
    """Reset the hidden values before their matrix, as ONNX does unless it is told."""
    (gate, activation), (h,) = weights.activations, state
    given = functional.linear(x, weights.input, weights.input_bias).chunk(3, dim=-1)
    matrices = weights.hidden.chunk(3)
    biases: Sequence[Tensor | None] = (None,) * 3 if weights.hidden_bias is None else weights.hidden_bias.chunk(3)
    update, reset = (gate(given[i] + functional.linear(h, matrices[i], biases[i])) for i in range(2))
    new = activation(given[2] + functional.linear(reset * h, matrices[2], biases[2]))
    return (new + update * (h - new),)


def _converter(cell: Callable[[_Weights, Tensor, State], State], states: int) -> Converter:
    def converted(call: Call, values: Values, shape: Shape) -> list[Tensor]:
        _check(call, values)
        batch_first = bool(call.attributes.get("layout", 0))
        x = values[0].float.reshape(-1, *values[0].shape)
        x = x.transpose(1, 2) if batch_first else x
        found = []
        for index in range(len(values[1].float)):
            weights = _weights(call, values, index)
            backwards = _directions(call)[index] == "reverse"
            state = tuple(
                _start(optional(values, 5 + place), index, x, weights, batch_first) for place in range(states)
            )
            found.append(_unrolled(cell, weights, x, state, backwards))
        every = torch.stack([torch.stack(steps, dim=1) for steps, _ in found], dim=2)  # (n, steps, dirs, batch, hidden)
        last = [torch.stack([state[place] for _, state in found], dim=1) for place in range(states)]
        if batch_first:
            every, last = every.permute(0, 3, 1, 2, 4), [each.transpose(1, 2) for each in last]
        return [every, *last]

    return converted


def _unrolled(
    cell: Callable[[_Weights, Tensor, State], State], weights: _Weights, x: Tensor, state: State, backwards: bool
) -> tuple[list[Tensor], State]:
    """Return the hidden values after each step, in the order of the sequence, and the last state."""
    steps: list[Tensor] = []
    for place in range(x.shape[1])[:: -1 if backwards else 1]:
        state = cell(weights, x[:, place], state)
        steps.append(state[0])
    return steps[:: -1 if backwards else 1], state


def _start(given: Value | None, index: int, x: Tensor, weights: _Weights, batch_first: bool) -> Tensor:
    """Return the state of a direction before its first step, 0 where it is not given."""
    if given is None:
        return torch.zeros(x.shape[2], weights.hidden.shape[1], dtype=x.dtype, device=x.device)
    state = given.float.reshape(-1, *given.shape)
    return state[:, :, index] if batch_first else state[:, index]


def _weights(call: Call, values: Values, index: int) -> _Weights:
    bias = optional(values, 3)
    own, recurrent = (None, None) if bias is None else bias.float[index].tensor_split(2)
    each = len(_DEFAULTS[call.operator])
    activations = _activations(call)[index * each : (index + 1) * each]
    if limit := float(call.attributes.get("clip", 0.0)):
        # onnxruntime clips what goes into gates, not the state of a cell on its way out.
        gates = 2 if call.operator == "LSTM" else each
        activations = [*(partial(_clipped, gate, limit) for gate in activations[:gates]), *activations[gates:]]
    return _Weights(values[1].float[index], values[2].float[index], own, recurrent, activations)


def _activations(call: Call) -> list[Callable[[Tensor], Tensor]]:
    """Return the activations of all directions; their numbers are listed for those that have any, in this order."""
    names = [name.lower() for name in call.attributes.get("activations", ())]
    names = names or [*_DEFAULTS[call.operator]] * len(_directions(call))
    alphas, betas = (iter(call.attributes.get(f"activation_{each}", ())) for each in ("alpha", "beta"))
    found = list[Callable[[Tensor], Tensor]]()
    for name in names:
        if name in _ACTIVATIONS:
            activation = _ACTIVATIONS[name]
        else:
            alpha, beta, function = _OF_TWO_NUMBERS[name]
            alpha, beta = float(next(alphas, alpha)), float(next(betas, beta)) if name in _WITH_BETA else beta
            activation = partial(_with_numbers, function, alpha, beta)
        found.append(activation)
    return found


def _with_numbers(function: Callable[[Tensor, float, float], Tensor], alpha: float, beta: float, x: Tensor) -> Tensor:
    return function(x, alpha, beta)


def _clipped(function: Callable[[Tensor], Tensor], limit: float, x: Tensor) -> Tensor:
    return function(x.clamp(-limit, limit))


def _directions(call: Call) -> Sequence[str]:
    direction = str(call.attributes.get("direction", "forward"))
    return ("forward", "reverse") if direction == "bidirectional" else (direction,)


def _check(call: Call, values: Values) -> None:
    if not all(value.constant for value in values[1:4] if value.present):
        raise call.refuse("its weights depend on the input")
    if optional(values, 4) is not None and set(values[4].integers) != {_length(call, values)}:
        raise call.refuse("sequences of different lengths; expected all to be as long as the input")
    if optional(values, 7) is not None:
        raise call.refuse("peepholes are not supported")
    if call.attributes.get("input_forget", 0):
        raise call.refuse("input_forget is not supported")
    known = _ACTIVATIONS.keys() | _OF_TWO_NUMBERS.keys()
    unknown = {name.lower() for name in call.attributes.get("activations", ())} - known
    if unknown:
        raise call.refuse(f"activations {sorted(unknown)}; expected {', '.join(sorted(known))}")


def _length(call: Call, values: Values) -> int:
    return values[0].shape[1 if call.attributes.get("layout", 0) else 0]


def _gru(call: Call, values: Values, shape: Shape) -> Converted:
    cell = gru if call.attributes.get("linear_before_reset", 0) else gru_of_reset
    return _converter(cell, 1)(call, values, shape)


CONVERTERS: Mapping[str, Converter] = {"GRU": _gru, "LSTM": _converter(lstm, 2), "RNN": _converter(rnn, 1)}
