"""Makes one ONNX file of the networks that a query of VNN-LIB 2 declares, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.formats.vnnlib import DeclaredQuery


class MisfitError(ValueError):
    """Files of networks do not fit what a query declares."""


def contents_by_network(query: DeclaredQuery, given: Mapping[str | None, bytes]) -> list[bytes]:
    """Return the content of each declared network, in their order. One file without a name is that of the only network
    that is not equal to another. Raises :class:`MisfitError` for a missing file, or one too many.
    """
    named = {name: content for name, content in given.items() if name is not None}
    own = [each.name for each in query.networks if each.relation != "equal-to"]
    if None in given:
        if len(own) != 1 or named:
            raise MisfitError(f"one file for the networks {', '.join(own)}: expected NAME=FILE for each of them")
        named = {own[0]: given[None]}
    known = [each.name for each in query.networks]
    if strange := [name for name in named if name not in known]:
        raise MisfitError(f"the query declares no network {', '.join(strange)}; it declares {', '.join(known)}")
    if missing := [name for name in own if name not in named]:
        raise MisfitError(f"there is no file for the network {', '.join(missing)}: expected NAME=FILE")
    for each in query.networks:
        if each.relation == "equal-to" and named.setdefault(each.name, named[each.other]) != named[each.other]:
            raise MisfitError(f"{each.name} is equal to {each.other}, and its file is another: expected the same")
    return [named[each.name] for each in query.networks]


def join_declared(query: DeclaredQuery, contents: Sequence[bytes]) -> bytes:
    """Return one file of all networks, which gives their hidden values, and their inputs if the query compares these.
    Raises :class:`MisfitError`.
    """
    from service.formats.onnx import JoinedPart, OnnxError, join_networks  # noqa: PLC0415 - brings onnx, which others need not

    parts = [
        JoinedPart(each.name, data, tuple(tensor.value for tensor in each.having("hidden")))
        for each, data in zip(query.networks, contents, strict=True)
    ]
    try:
        return join_networks(parts, gives_inputs=query.compares_inputs)
    except OnnxError as error:
        raise MisfitError(str(error)) from error
