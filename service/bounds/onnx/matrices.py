"""Converters of products of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.operators.onnx import Call, Converter, Shape, Value, Values, aligned


def matrix_product(call: Call, values: Values, shape: Shape) -> Tensor:
    left, right = values
    if left.constant:
        if len(left.shape) == 1:
            raise call.refuse("a constant vector times a value; a constant matrix is supported")
        x = right.float if len(right.shape) > 1 else right.float.unsqueeze(-1)
        found = torch.matmul(x.transpose(-1, -2), left.float.transpose(-1, -2)).transpose(-1, -2)
        return found.reshape(-1, *shape)
    if right.constant:
        matrix = right.float if len(right.shape) > 1 else right.float.unsqueeze(-1)
        x, kept = left.float, max(len(matrix.shape) - len(left.shape), 0)
        if kept:
            x = x.reshape(-1, *(1,) * kept, *left.shape)
        return torch.matmul(x, matrix).reshape(-1, *shape)
    rank = max(len(left.shape), len(right.shape), 2)
    first = left.shape if len(left.shape) > 1 else (1, *left.shape)
    second = right.shape if len(right.shape) > 1 else (*right.shape, 1)
    x = left.float.reshape(-1, *(1,) * (rank - len(first)), *first)
    y = right.float.reshape(-1, *(1,) * (rank - len(second)), *second)
    return torch.matmul(x, y).reshape(-1, *shape)


def gemm(call: Call, values: Values, shape: Shape) -> Tensor:
    left, right = (
        _transposed(value) if call.attributes.get(name, 0) else value
        for value, name in zip(values[:2], ("transA", "transB"), strict=True)
    )
    alpha, beta = float(call.attributes.get("alpha", 1.0)), float(call.attributes.get("beta", 1.0))
    bias = values[2] if len(values) > 2 else None
    if right.constant and (bias is None or (bias.constant and bias.float.numel() == shape[-1])):
        weight = right.float.mT if alpha == 1 else right.float.mT * alpha
        vector = None if bias is None else bias.float.reshape(-1) * beta
        return functional.linear(left.float, weight, vector)
    found = matrix_product(call, [left, right], shape) * alpha
    if bias is None:
        return found
    first, second = aligned([Value(shape, found), bias])
    return first + second * beta


def _transposed(value: Value) -> Value:
    array = None if value.array is None else value.array.T
    return Value(value.shape[::-1], value.float.transpose(-1, -2), array)


def einsum(call: Call, values: Values, shape: Shape) -> Tensor:
    """Compute an einsum of one or two values as a sum and a product of matrices, so that instances stay apart."""
    equation = str(call.attributes["equation"]).replace(" ", "")
    given, _, result = equation.partition("->")
    terms = given.split(",")
    if "->" not in equation or "." in equation or len(terms) > 2 or any(len(set(each)) < len(each) for each in terms):
        raise call.refuse(f"equation {equation!r}: expected one or two terms, different letters in each, and an output")
    # Matrices of constants come last, as in any linear layer.
    pairs = sorted(zip(terms, values, strict=True), key=lambda pair: pair[1].constant)
    sizes = {letter: size for term, value in pairs for letter, size in zip(term, value.shape, strict=True)}
    everywhere = result + "".join(term for term, _ in pairs)
    summed = [_summed(term, value, {each for each in term if everywhere.count(each) > 1}) for term, value in pairs]
    term, value = summed[0] if len(summed) == 1 else _contracted(summed[0], summed[1], result, sizes)
    return value.float.permute(0, *(term.index(letter) + 1 for letter in result)).reshape(-1, *shape)


def _summed(term: str, value: Value, kept: set[str]) -> tuple[str, Value]:
    """Sum over the letters that nothing else has."""
    first = 0 if value.constant else 1
    dims = [index + first for index, letter in enumerate(term) if letter not in kept]
    left = "".join(letter for letter in term if letter in kept)
    shape = tuple(size for letter, size in zip(term, value.shape, strict=True) if letter in kept)
    return left, Value(shape, value.float.sum(dim=dims) if dims else value.float, value.array)


def _contracted(
    first: tuple[str, Value], second: tuple[str, Value], result: str, sizes: Mapping[str, int]
) -> tuple[str, Value]:
    """Return the product of two terms and its letters."""
    both = [letter for letter in first[0] if letter in second[0]]
    shared, inner = [each for each in both if each in result], [each for each in both if each not in result]
    rows, columns = ([each for each in term if each not in both] for term, _ in (first, second))
    left = _as_matrix(*first, (shared, rows, inner), sizes)
    right = _as_matrix(*second, (shared, inner, columns), sizes)
    letters = "".join([*shared, *rows, *columns])
    shape = tuple(sizes[letter] for letter in letters)
    return letters, Value(shape, torch.matmul(left, right).reshape(-1, *shape))


def _as_matrix(
    term: str, value: Value, parts: tuple[list[str], list[str], list[str]], sizes: Mapping[str, int]
) -> Tensor:
    """Return ``(instances if it has any, *first part, second part, third part)``."""
    first = 0 if value.constant else 1
    order = [term.index(letter) + first for part in parts for letter in part]
    lengths = [sizes[letter] for letter in parts[0]] + [prod(sizes[each] for each in part) for part in parts[1:]]
    x = value.float.permute(*range(first), *order)
    return x.reshape(*[-1] * first, *lengths)


CONVERTERS: Mapping[str, Converter] = {"Einsum": einsum, "Gemm": gemm, "MatMul": matrix_product}
