"""Moving tensors between pipeline stages.

The first message over a boundary in each direction is preceded by a header with its type and shape; both sides then
remember it under the current *key*. A key stands for a set of shapes: a caller whose shapes change calls
:meth:`Transport.begin` with another key, on all ranks at the same point. Sends never wait. Receives are posted in order
and waited for when their tensor is needed.

The :class:`Channels` say which process group carries which messages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
import torch.distributed as dist
from torch import Tensor

from service.parallel.collectives import agree, resolve
from service.parallel.mesh import Mesh
from service.parallel.pipeline.tags import (
    HEADER_LENGTH,
    Direction,
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
_SEND_WINDOW = 8


_UNKNOWN = "unknown shapes"

_Route = tuple[int, int, Direction]
"""Sending rank, receiving rank, kind: messages of one route arrive in the order in which they were sent."""


@dataclass(frozen=True)
class Buffer:
    """Memory for one message. ``free`` is when the device last used it; ``None`` if work is done at once."""

    tensor: Tensor
    free: torch.cuda.Event | None


class BufferPool:
    """Receive buffers by kind of tensor; ``allocated`` counts how many were ever made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated = 0
        self._free: dict[TensorKind, list[Buffer]] = defaultdict(list)

    def take(self, kind: TensorKind) -> Buffer:
        if self._free[kind]:
            return self._free[kind].pop()
        self.allocated += 1
        return Buffer(torch.empty(kind.shape, dtype=kind.dtype, device=self.device), self._now())

    def give_back(self, tensor: Tensor) -> None:
        self._free[TensorKind.of(tensor)].append(Buffer(tensor, self._now()))

    def _now(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


@dataclass
class PendingReceive:
    """A requested receive. It is posted only after the earlier ones on its route."""

    message: Message
    buffer: Tensor | None = None
    work: dist.Work | None = None


@dataclass
class _Inlet:
    """Holds messages that arrive over one boundary in one direction: their kind once known, till then the header."""

    kind: TensorKind | None = None
    header: Tensor | None = None
    header_work: dist.Work | None = None


class Transport:
    """One rank's end of all boundaries of a pipeline whose stage s belongs to pipeline rank ``owners[s]``."""

    def __init__(self, rank: int, owners: tuple[int, ...], channels: Channels, device: torch.device) -> None:
        self.rank, self.owners, self.channels, self.device = rank, owners, channels, device
        self.pool = BufferPool(device)
        # A transfer waits for the work of its stream. On the computing stream that would be all work so far; on
        # a stream of their own, receives wait only until their buffer is free.
        self._receiving = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._in_flight: dict[_Route, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._queued: dict[_Route, deque[PendingReceive]] = defaultdict(deque)
        self._announced: dict[Hashable, dict[tuple[int, Direction], TensorKind]] = defaultdict(dict)
        self._inlets: dict[Hashable, dict[tuple[int, Direction], _Inlet]] = defaultdict(lambda: defaultdict(_Inlet))
        self.begin((), 1)

    def begin(self, key: Hashable, micro_batches: int) -> None:
        """Start a run of ``micro_batches`` over shapes that ``key`` stands for; earlier runs must have finished."""
        self.tags = TagSpace(len(self.owners) - 1, micro_batches)
        self._key = (key, micro_batches)
        # While headers are still read, a receiver may post its receives later than its schedule says.
        self._acquainted = self._key in self._announced or self._key in self._inlets

    def begin_unknown(self) -> None:
        """Start a run of one micro-batch of unknown shapes: a header announces each tensor."""
        self._announced.pop((_UNKNOWN, 1), None)
        self._inlets.pop((_UNKNOWN, 1), None)
        self.begin(_UNKNOWN, 1)

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

    def receive(self, message: Message) -> PendingReceive:
        """Ask for a message; :meth:`wait` gives its tensor.

        The order of calls is the order of arrival on each route, headers included: behind one whose header has not
        been read, a receive is only queued.
        """
        pending = PendingReceive(message)
        queue = self._queued[self._route(message)]
        queue.append(pending)
        if len(queue) == 1:
            self._advance(queue)
        return pending

    def wait(self, pending: PendingReceive) -> Tensor:
        """Return the received tensor: a pooled buffer that is the caller's until :meth:`release`."""
        queue = self._queued[self._route(pending.message)]
        while pending.buffer is None:
            self._read_header(queue[0].message)
            self._advance(queue)
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

    def _inlet(self, message: Message) -> _Inlet:
        return self._inlets[self._key][message.boundary, message.kind]

    def _advance(self, queue: deque[PendingReceive]) -> None:
        """Post all possible receives, up to the first of an unknown kind, and the header that tells its kind."""
        while queue and (kind := self._inlet(queue[0].message).kind) is not None:
            self._post(queue.popleft(), kind)
        if queue:
            message = queue[0].message
            inlet, tag = self._inlet(message), self.tags.header(message.boundary, message.kind)
            if inlet.header is None:
                inlet.header = torch.zeros(HEADER_LENGTH, dtype=torch.int64, device=self.device)
                inlet.header_work = self._post_receive(message, inlet.header, tag)

    def _read_header(self, message: Message) -> None:
        inlet = self._inlet(message)
        assert inlet.header is not None
        assert inlet.header_work is not None
        inlet.header_work.wait()
        inlet.kind = decode_header(inlet.header.cpu(), self.tags.header(message.boundary, message.kind))

    def _post(self, pending: PendingReceive, kind: TensorKind) -> None:
        buffer = self.pool.take(kind)
        pending.buffer, tag = buffer.tensor, self.tags.tag(pending.message)
        if self._receiving is None or buffer.free is None:
            pending.work = self._post_receive(pending.message, buffer.tensor, tag)
            return
        with torch.cuda.stream(self._receiving):
            self._receiving.wait_event(buffer.free)
            pending.work = self._post_receive(pending.message, buffer.tensor, tag)

    def _post_receive(self, message: Message, buffer: Tensor, tag: int) -> dist.Work:
        route = self._route(message)
        sender, receiver, _ = route
        assert receiver == self.rank, f"{message} goes to rank {receiver}"
        group = self.channels.groups[route]
        work = dist.irecv(buffer, self.channels.ranks[sender], group, tag if self.channels.has_tags else 0)
        assert work is not None
        return work

    def _post_send(self, message: Message, tensor: Tensor, tag: int) -> None:
        route = self._route(message)
        sender, receiver, _ = route
        assert sender == self.rank, f"{message} comes from rank {sender}"
        self._let_go()
        sent = self._in_flight[route]
        if self.channels.has_tags and self._acquainted and len(sent) >= _SEND_WINDOW:
            sent.popleft()[0].wait()
        group = self.channels.groups[route]
        work = dist.isend(tensor, self.channels.ranks[receiver], group, tag if self.channels.has_tags else 0)
        assert work is not None
        sent.append((work, tensor))

    def _let_go(self) -> None:
        """Drop sent tensors, on every route: one lives no longer than its transfer and the next one."""
        for sent in self._in_flight.values():
            while sent and sent[0][0].is_completed():
                sent.popleft()

    def _route(self, message: Message) -> _Route:
        below, above = self.owners[message.boundary], self.owners[message.boundary + 1]
        return (below, above, message.kind) if message.kind is Direction.ACTIVATION else (above, below, message.kind)


@dataclass(frozen=True)
class Channels:
    """Groups by (sending pipeline rank, receiving pipeline rank, kind).

    gloo matches messages by tag, so one group carries all. NCCL matches in order per communicator, and a transfer
    that waits blocks those behind it: each direction between two ranks has a communicator of its own there, and
    the schedule's verifier proves that both sides use it in the same order.
    """

    ranks: tuple[int, ...]
    has_tags: bool
    groups: dict[_Route, dist.ProcessGroup]


def connect(mesh: Mesh, owners: Sequence[int]) -> Channels:
    """Return channels between the owners of neighbouring stages; every rank of the job must call it at the same point.

    Raises :class:`DisagreementError` on all of them if one names other owners.
    """
    agree({"the stages' owners": tuple(owners)})
    if not mesh.pp.group:
        return Channels(mesh.pp_ranks, has_tags=True, groups={})
    shared = resolve(mesh.pp.group)
    routes = _routes(owners)
    if mesh.device_type != "cuda":
        return Channels(mesh.pp_ranks, has_tags=True, groups=dict.fromkeys(routes, shared))
    return Channels(mesh.pp_ranks, has_tags=False, groups=_own_communicators(mesh, routes))


def _routes(owners: Sequence[int]) -> list[_Route]:
    """Return every direction in use, once, in the same order on all ranks."""
    neighbours = {(lower, upper) for lower, upper in pairwise(owners) if lower != upper}
    forward = [(lower, upper, Direction.ACTIVATION) for lower, upper in sorted(neighbours)]
    backward = [(upper, lower, Direction.GRADIENT) for lower, upper in sorted(neighbours)]
    return forward + backward


def _own_communicators(mesh: Mesh, routes: Sequence[_Route]) -> dict[_Route, dist.ProcessGroup]:
    """Return a two-rank group for each route of each pipeline; all ranks help to make every one."""
    per_stage = mesh.spec.dp * mesh.spec.tp
    own = {}
    for pipeline, route in product(range(per_stage), routes):
        sender, receiver, _ = route
        group = dist.new_group(sorted(rank * per_stage + pipeline for rank in (sender, receiver)))
        if pipeline == mesh.rank % per_stage and mesh.pp.rank in (sender, receiver):
            own[route] = group
    _warm_up(mesh, own)
    return own


def _warm_up(mesh: Mesh, own: dict[_Route, dist.ProcessGroup]) -> None:
    """Send one number over each route, in the order that all ranks share.

    NCCL connects two ranks at their first transfer, and both hosts wait there for each other. In the midst of a
    schedule one of them may be behind a kernel that waits for the other: a deadlock.
    """
    number = torch.zeros(1, device=mesh.device_type)
    for (sender, receiver, _), group in own.items():
        if mesh.pp.rank == sender:
            dist.send(number, mesh.pp_ranks[receiver], group)
        else:
            dist.recv(number, mesh.pp_ranks[sender], group)
    torch.cuda.synchronize()
