"""Uploads of a few kilobytes that once took minutes and gigabytes to check, and those of their kind."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
from archives import zipped
from lanes import first_fast
from onnx import ModelProto, TensorProto, helper
from serving import problems, stored

from service.formats.archive import FREE_COMPRESSED, Unpacking, UploadError
from service.formats.onnx import OnnxError
from service.formats.onnx.content import MOST_FIELDS
from service.formats.onnx.model_file import parse_unpacked
from service.formats.protobuf import has_more_fields
from service.jobs.checks.queries import MOST_SHOWN
from service.jobs.files import DataLayout
from service.jobs.records import LONGEST_TEXT

DECLARED = "(declare-const X_0 Real)\n(declare-const Y_0 Real)\n(assert (<= X_0 1))\n(assert (>= X_0 0))\n"
EITHER = "(or (<= Y_0 0) (<= Y_0 1))"
LINE = b"(assert (<= Y_0 0.5))\n"


def model(**fields: Any) -> ModelProto:
    """``y = relu(x)``, with the graph's other fields as given."""
    sizes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 1)) for name in "xy"]
    nodes = fields.pop("nodes", [helper.make_node("Relu", ["x"], ["y"])])
    graph = helper.make_graph(nodes, "g", sizes[:1], sizes[1:], **fields)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def empty_nodes(count: int) -> bytes:
    """A model with so many nodes without a field, of two bytes each."""
    content = model().SerializeToString()
    nodes = b"\x0a\x00" * count
    length = len(nodes)
    varint = bytearray()
    while length:
        varint.append(length & 127 | (128 if length > 127 else 0))
        length >>= 7
    return content + b"\x3a" + bytes(varint) + nodes


def bundle() -> bytes:
    """Forty queries, each within the limits of one."""
    text = gzip.compress(DECLARED.encode() + LINE + b";" * (FREE_COMPRESSED // 3))
    rows = "".join(f"m.onnx,{each}.vnnlib\n" for each in range(40))
    queries = {f"{each}.vnnlib.gz": text for each in range(40)}
    return zipped({"instances.csv": rows.encode(), "m.onnx": model().SerializeToString(), **queries})


ONNX = {"model": {"onnx": None}, "property": {"box": {"lower": [0], "upper": [1]}}}
UPLOADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a product of 2^16 disjuncts": (lambda: gzip.compress(f"{DECLARED}(assert (and {EITHER * 16}))".encode()), {}),
    "64 MiB of text": (lambda: gzip.compress(DECLARED.encode() + LINE * (2**26 // len(LINE) - 9)), {}),
    "32 MiB of empty nodes": (lambda: gzip.compress(empty_nodes(2**24)), ONNX),
    "3 MiB of empty nodes": (lambda: empty_nodes(3 * 2**19), ONNX),
    "a bundle of 40 queries": (bundle, {"model": None, "property": {"instances": None}}),
    "nodes without a rule": (
        lambda: gzip.compress(
            model(nodes=[helper.make_node("Nothing", ["x"], ["y"], name="n" * 100)] * 50_000).SerializeToString()
        ),
        ONNX,
    ),
}


@pytest.mark.parametrize("upload", first_fast(2, UPLOADS))
def test_a_small_upload_is_refused_within_a_quarter_of_a_gibibyte_and_in_short(data: DataLayout, upload: str) -> None:
    """Its check ends by a refusal of its own, or by the limits of its process."""
    make, fields = UPLOADS[upload]
    file_id = stored(data, make())
    found = problems(data, file_id, 0.25, 20, **_about(file_id, fields))
    assert {problem.path.partition(".")[0] for problem in found} in ({"property"}, {"model"})
    assert len(found) <= MOST_SHOWN
    assert all(len(text) <= LONGEST_TEXT + 1 for each in found for text in (each.message, each.expected))


def _about(file_id: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: file_id if inner is None else inner for key, inner in value.items()} if value else value
        for name, value in fields.items()
    }


def test_what_unpacks_to_much_more_is_refused_before_it_is_unpacked_whole() -> None:
    """The limit counts all members together and what is compressed within them; a member that is read twice once."""
    unpacking = Unpacking(1000)
    half = gzip.compress(bytes(FREE_COMPRESSED // 2))
    for _ in range(3):
        assert len(unpacking.read(half, "a", 2**30)) == FREE_COMPRESSED // 2
    assert len(unpacking.read(half, "b", 2**30)) == FREE_COMPRESSED // 2
    with pytest.raises(UploadError, match="c makes the upload of 1000 bytes unpack to more than 16777216"):
        unpacking.read(gzip.compress(b"x"), "c", 2**30)
    assert unpacking.read(b"plain", "d", 2**30) == b"plain"


@pytest.mark.slow
def test_a_large_upload_may_unpack_to_many_times_its_size() -> None:
    most = 100 * 2**20
    unpacked = Unpacking(2**20).read(gzip.compress(bytes(most)), "a", 2**30)
    assert len(unpacked) == most
    with pytest.raises(UploadError):
        Unpacking(2**20).read(gzip.compress(bytes(most + 1)), "a", 2**30)


def test_unpacking_ends_at_what_is_asked_for() -> None:
    assert len(Unpacking(1).read(gzip.compress(bytes(1000)), "a", 10)) == 11


@pytest.mark.slow
def test_fields_are_counted_before_a_model_is_made() -> None:
    """Nodes, their names and attributes, shapes and what is in graphs within attributes; not numbers one by one."""
    inner = model().graph
    attribute = helper.make_attribute("then_branch", inner)
    node = helper.make_node("If", ["x"], ["y"])
    node.attribute.append(attribute)
    weights = helper.make_tensor("w", TensorProto.FLOAT, (1000,), [0.5] * 1000)
    made = model(nodes=[node], initializer=[weights])
    count = _fields(made)
    content = made.SerializeToString()
    assert not has_more_fields(content, ModelProto.DESCRIPTOR, count)
    assert has_more_fields(content, ModelProto.DESCRIPTOR, count - 1)
    with pytest.raises(OnnxError, match=f"more than {MOST_FIELDS} fields"):
        parse_unpacked(empty_nodes(MOST_FIELDS))


def _fields(message: Any) -> int:
    """As protobuf itself tells, where a list of numbers that is packed is one field."""
    count = 0
    for descriptor, value in message.ListFields():
        values = value if descriptor.is_repeated and not descriptor.is_packed else [value]
        count += len(values)
        if descriptor.message_type is not None:
            count += sum(_fields(each) for each in values)
    return count


@pytest.mark.parametrize(
    "content", [b"\x0a", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b\x00", b"\x80" * 20]
)
def test_counting_fields_of_what_is_no_message_ends(content: bytes) -> None:
    assert not has_more_fields(content, ModelProto.DESCRIPTOR, 100)
