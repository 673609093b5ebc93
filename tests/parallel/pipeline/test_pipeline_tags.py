"""Names of messages: unique, bounded, and announced truthfully."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.parallel.pipeline.tags import (
    DTYPES,
    MAX_DIMENSIONS,
    TAG_LIMIT,
    Direction,
    Message,
    TagSpace,
    TensorKind,
    TransportError,
    decode_header,
    encode_header,
)
from service.parallel.pipeline.transport import BufferPool

KINDS = st.builds(
    TensorKind, st.lists(st.integers(0, 2**40), max_size=MAX_DIMENSIONS).map(tuple), st.sampled_from(DTYPES)
)


@given(st.integers(1, 9), st.integers(1, 20))
def test_no_two_messages_or_headers_share_a_tag(boundaries: int, micro_batches: int) -> None:
    space = TagSpace(boundaries, micro_batches)
    messages = [Message(*each) for each in product(range(boundaries), range(micro_batches), Direction)]
    tags = [space.tag(message) for message in messages]
    tags += [space.header(boundary, kind) for boundary, kind in product(range(boundaries), Direction)]
    assert sorted(tags) == list(range(2 * boundaries * (micro_batches + 1)))
    assert space.tag(Message(0, 3 % micro_batches, Direction.GRADIENT)) == space.base(0) + 2 * (3 % micro_batches) + 1


def test_tags_that_do_not_fit_are_refused_with_the_numbers() -> None:
    micro_batches = (TAG_LIMIT + 1) // 4 - 1
    assert TagSpace(2, micro_batches).header(1, Direction.GRADIENT) == TAG_LIMIT
    with pytest.raises(TransportError, match=rf"3 boundaries × 2 × .* up to \d+; the largest is {TAG_LIMIT}"):
        TagSpace(3, micro_batches)


@pytest.mark.parametrize("message", [Message(2, 0, Direction.ACTIVATION), Message(0, 4, Direction.GRADIENT)])
def test_a_message_outside_the_space_has_no_tag(message: Message) -> None:
    with pytest.raises(TransportError, match=f"no tag for {message}: there are 2 boundaries and 4 micro-batches"):
        TagSpace(2, 4).tag(message)


@given(KINDS, st.integers(0, TAG_LIMIT))
def test_headers_say_what_was_meant(kind: TensorKind, tag: int) -> None:
    assert decode_header(encode_header(kind, tag), tag) == kind


@given(KINDS, st.integers(0, TAG_LIMIT - 1))
def test_a_header_of_another_message_is_refused(kind: TensorKind, tag: int) -> None:
    with pytest.raises(TransportError, match=f"expected the header of tag {tag + 1}, got that of tag {tag}"):
        decode_header(encode_header(kind, tag), tag + 1)


def test_what_is_no_header_is_refused() -> None:
    with pytest.raises(TransportError, match="expected the header of tag 3"):
        decode_header(torch.zeros(12, dtype=torch.int64), 3)
    header = encode_header(TensorKind((2,), torch.float32), 3)
    header[2] = len(DTYPES)
    with pytest.raises(TransportError, match="expected the header of tag 3"):
        decode_header(header, 3)


@pytest.mark.parametrize("kind", [TensorKind((1,) * 9, torch.float32), TensorKind((1,), torch.complex64)])
def test_what_a_header_cannot_say_is_refused(kind: TensorKind) -> None:
    with pytest.raises(TransportError, match="cannot be announced: at most 8 dimensions of float32"):
        encode_header(kind, 0)


def test_buffers_are_used_again_by_their_kind() -> None:
    pool = BufferPool(torch.device("cpu"))
    narrow, wide = TensorKind((2,), torch.float32), TensorKind((3,), torch.float32)
    first, second = pool.take(narrow).tensor, pool.take(narrow).tensor
    assert first.data_ptr() != second.data_ptr()
    pool.give_back(first)
    assert pool.take(wide).tensor.shape == (3,)
    assert pool.take(narrow).tensor is first
    assert pool.allocated == 3
