"""Moving tensors between pipeline stages.

The first message over a boundary in each direction is preceded by a header with its type and shape; both sides then
remember it under the current *key*. A key stands for a set of shapes: a caller whose shapes change calls
:meth:`Transport.begin` with another key, on all ranks at the same point. Sends never wait. Receives are posted in order
and waited for when their tensor is needed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from service.parallel.pipeline.channels import Channels
from service.parallel.pipeline.tags import (
    HEADER_LENGTH,
    Kind,
    Message,
    TagSpace,
    TensorKind,
    TransportError,
    decode_header,
    encode_header,
)

# gloo reports a send as complete only to who waits for it. So that sent tensors do not live until the end of a step,
# the send this many before the present one, on the same route, is waited for: a verified schedule has its receive
# posted by then.
SEND_WINDOW = 8


class BufferPool:
    """Receive buffers by kind of tensor; ``allocated`` counts how many were ever made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated = 0
        self._free: dict[TensorKind, list[Tensor]] = defaultdict(list)

    def take(self, kind: TensorKind) -> Tensor:
        if self._free[kind]:
            return self._free[kind].pop()
        self.allocated += 1
        return torch.empty(kind.shape, dtype=kind.dtype, device=self.device)

    def give_back(self, buffer: Tensor) -> None:
        self._free[TensorKind.of(buffer)].append(buffer)


@dataclass
class Pending:
    """A posted receive. While the shape is not known yet it has neither buffer nor transfer."""

    message: Message
    buffer: Tensor | None = None
    work: dist.Work | None = None


@dataclass
class Inlet:
    """What arrives over one boundary in one direction: its kind once known, receives that wait to know it."""

    kind: TensorKind | None = None
    header: Tensor | None = None
    header_work: dist.Work | None = None
    waiting: deque[Pending] = field(default_factory=deque)


class Transport:
    """One rank's end of all boundaries of a pipeline whose stage s belongs to pipeline rank ``owners[s]``."""

    def __init__(self, rank: int, owners: tuple[int, ...], channels: Channels, device: torch.device) -> None:
        self.rank, self.owners, self.channels, self.device = rank, owners, channels, device
        self.pool = BufferPool(device)
        self._in_flight: dict[tuple[int, Kind], deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._announced: dict[Hashable, dict[tuple[int, Kind], TensorKind]] = defaultdict(dict)
        self._inlets: dict[Hashable, dict[tuple[int, Kind], Inlet]] = defaultdict(lambda: defaultdict(Inlet))
        self.begin((), 1)

    def begin(self, key: Hashable, micro_batches: int) -> None:
        """Start a run of ``micro_batches`` over shapes that ``key`` stands for; earlier runs must have finished."""
        self.tags = TagSpace(len(self.owners) - 1, micro_batches)
        self._key = (key, micro_batches)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send without waiting. Raises :class:`TransportError` when the shape is not what this key announced."""
        kind, place = TensorKind.of(tensor), (message.boundary, message.kind)
        announced = self._announced[self._key].get(place)
        if announced is None:
            header = encode_header(kind, self.tags.header(*place))
            self._post_send(message, header.to(self.device), self.tags.header(*place))
            self._announced[self._key][place] = kind
        elif announced != kind:
            raise TransportError(f"{message} is {kind}, but {announced} was announced; begin() with another key")
        self._post_send(message, tensor.contiguous(), self.tags.tag(message))

    def receive(self, message: Message) -> Pending:
        """Post a receive; :meth:`wait` gives its tensor."""
        inlet, pending = self._inlets[self._key][message.boundary, message.kind], Pending(message)
        if inlet.kind is not None:
            self._post(pending, inlet.kind)
            return pending
        if inlet.header is None:
            inlet.header = torch.zeros(HEADER_LENGTH, dtype=torch.int64, device=self.device)
            inlet.header_work = self._post_receive(
                message, inlet.header, self.tags.header(message.boundary, message.kind)
            )
        inlet.waiting.append(pending)
        return pending

    def wait(self, pending: Pending) -> Tensor:
        """The received tensor: a pooled buffer that is the caller's until :meth:`release`."""
        if pending.buffer is None:
            self._open(self._inlets[self._key][pending.message.boundary, pending.message.kind], pending.message)
        assert pending.buffer is not None
        assert pending.work is not None
        pending.work.wait()
        return pending.buffer

    def release(self, buffer: Tensor) -> None:
        self.pool.give_back(buffer)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for sent in self._in_flight.values():
            while sent:
                sent.popleft()[0].wait()

    def _open(self, inlet: Inlet, message: Message) -> None:
        """Read the header, then post the receives that waited for it, in their order."""
        assert inlet.header is not None
        assert inlet.header_work is not None
        inlet.header_work.wait()
        inlet.kind = decode_header(inlet.header.cpu(), self.tags.header(message.boundary, message.kind))
        while inlet.waiting:
            self._post(inlet.waiting.popleft(), inlet.kind)

    def _post(self, pending: Pending, kind: TensorKind) -> None:
        pending.buffer = self.pool.take(kind)
        pending.work = self._post_receive(pending.message, pending.buffer, self.tags.tag(pending.message))

    def _post_receive(self, message: Message, buffer: Tensor, tag: int) -> dist.Work:
        sender, receiver, group = self._route(message)
        assert receiver == self.rank, f"{message} goes to rank {receiver}"
        work = dist.irecv(buffer, self.channels.ranks[sender], group, tag if self.channels.has_tags else 0)
        assert work is not None
        return work

    def _post_send(self, message: Message, tensor: Tensor, tag: int) -> None:
        sender, receiver, group = self._route(message)
        assert sender == self.rank, f"{message} comes from rank {sender}"
        sent = self._in_flight[receiver, message.kind]
        while sent and sent[0][0].is_completed():
            sent.popleft()
        if self.channels.has_tags and len(sent) >= SEND_WINDOW:
            sent.popleft()[0].wait()
        work = dist.isend(tensor, self.channels.ranks[receiver], group, tag if self.channels.has_tags else 0)
        assert work is not None
        sent.append((work, tensor))

    def _route(self, message: Message) -> tuple[int, int, dist.ProcessGroup]:
        below, above = self.owners[message.boundary], self.owners[message.boundary + 1]
        sender, receiver = (below, above) if message.kind is Kind.ACTIVATION else (above, below)
        return sender, receiver, self.channels.group(sender, receiver, message.kind)
