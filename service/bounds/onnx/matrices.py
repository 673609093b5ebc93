"""Converters of products of matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from string import ascii_letters

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.operators.conversion import Call, Converter, Shape, Value, Values, aligned, optional


def matrix_product(call: Call, values: Values, shape: Shape) -> Tensor:
    left, right = values
    if left.constant and len(left.shape) == 1:
        raise call.refuse("a constant vector times a value; a constant matrix is supported")
    x, y = aligned([_unsqueezed(left, -2), _unsqueezed(right, -1)])
    # A matrix of constants comes last, as in any linear layer.
    found = torch.matmul(y.mT, x.mT).mT if left.constant else torch.matmul(x, y)
    return found.reshape(-1, *shape)


def _unsqueezed(value: Value, dim: int) -> Value:
    """Return a vector as a matrix of one row (``dim`` -2) or column (-1), and any other value as it is."""
    if len(value.shape) > 1:
        return value
    return Value((1, *value.shape) if dim == -2 else (*value.shape, 1), value.float.unsqueeze(dim), value.array)


def _gemm(call: Call, values: Values, shape: Shape) -> Tensor:
    left, right = (
        transposed(value) if call.attributes.get(name, 0) else value
        for value, name in zip(values[:2], ("transA", "transB"), strict=True)
    )
    alpha, beta = float(call.attributes.get("alpha", 1.0)), float(call.attributes.get("beta", 1.0))
    bias = optional(values, 2)
    is_row = bias is not None and bias.constant and bias.shape in (shape[-1:], (1, *shape[-1:]))
    if right.constant and (bias is None or is_row):
        weight = right.float.mT if alpha == 1 else right.float.mT * alpha
        vector = None if bias is None else bias.float.reshape(-1) * beta
        return functional.linear(left.float, weight, vector)
    found = matrix_product(call, [left, right], shape) * alpha
    if bias is None:
        return found
    first, second = aligned([Value(shape, found), bias])
    return first + second * beta


def transposed(value: Value) -> Value:
    """Return the value with its last two dimensions exchanged."""
    shape = (*value.shape[:-2], value.shape[-1], value.shape[-2])
    return Value(shape, value.float.transpose(-1, -2), None if value.array is None else value.array.swapaxes(-1, -2))


def _einsum(call: Call, values: Values, shape: Shape) -> Tensor:
    """Compute an einsum as sums and products of matrices, one after the other, so that instances stay apart."""
    terms, result = _letters(call, [len(value.shape) for value in values])
    lengths = [
        (letter, size)
        for term, value in zip(terms, values, strict=True)
        for letter, size in zip(term, value.shape, strict=True)
    ]
    sizes = dict(lengths)
    if any(sizes[letter] != size for letter, size in lengths):
        raise call.refuse("a letter of its equation stands for different lengths")
    # Matrices of constants come last, as in any linear layer.
    pairs = sorted(map(_diagonal, terms, values), key=lambda pair: pair[1].constant)
    everywhere = result + "".join(term for term, _ in pairs)
    pairs = [_summed(term, value, {each for each in term if everywhere.count(each) > 1}) for term, value in pairs]
    found = pairs.pop(0)
    while pairs:
        second = pairs.pop(0)
        found = _contracted(found, second, result + "".join(term for term, _ in pairs), sizes)
    term, value = found
    return value.float.permute(0, *(term.index(letter) + 1 for letter in result)).reshape(-1, *shape)


def _letters(call: Call, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each term and of the result; an ellipsis becomes letters that the equation does not use."""
    equation = str(call.attributes["equation"]).replace(" ", "")
    given, arrow, result = equation.partition("->")
    terms = given.split(",")
    unused = [each for each in ascii_letters if each not in equation]
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True) if "..." in term]
    if len(set(hidden)) > 1 or len(unused) < max(hidden, default=0):
        raise call.refuse(f"equation {equation!r}: an ellipsis stands for as many dimensions in each term")
    dots = "".join(unused[: max(hidden, default=0)])
    if not arrow:
        result = "..." * bool(hidden) + "".join(
            sorted(each for each in set(given) - set(".,") if given.count(each) == 1)
        )
    return [term.replace("...", dots) for term in terms], result.replace("...", dots)


def _diagonal(term: str, value: Value) -> tuple[str, Value]:
    """Take the diagonal of dimensions that have the same letter."""
    first = 0 if value.constant else 1
    while repeated := next((each for each in term if term.count(each) > 1), None):
        one, other = term.index(repeated), term.rindex(repeated)
        length = value.shape[one]
        x = value.float.movedim((one + first, other + first), (-2, -1)).flatten(-2)
        x = x.index_select(-1, torch.arange(length, device=x.device) * (length + 1))
        kept = [place for place in range(len(term)) if place not in (one, other)]
        term = "".join(term[place] for place in kept) + repeated
        value = Value((*(value.shape[place] for place in kept), length), x, value.array)
    return term, value


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


CONVERTERS: Mapping[str, Converter] = {"Einsum": _einsum, "Gemm": _gemm, "MatMul": matrix_product}
