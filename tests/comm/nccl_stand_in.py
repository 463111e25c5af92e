"""Takes the place of CuPy's NCCL and of torch.cuda's streams and events, for ranks that are threads.

It moves real bytes between the ranks, by the addresses, counts and types it is given, and writes every call down in the
order it comes. Queues are done as soon as they are filled. What this cannot show: NCCL itself, real streams, a hang on
a device.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plsc.comm import Communicator
from plsc.comm.cupy_nccl import CupyNcclCommunicator
from plsc.comm.nccl_session import Session, Streams

CURRENT = 7  # the address of the caller's stream
STREAM = 77  # the address of the stand-in's stream of verbs; lanes have the next ones


class StandIn:
    """CuPy's nccl module for one rank, over the communicator `wires`."""

    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
    NCCL_INT8, NCCL_UINT8, NCCL_INT32 = 0, 1, 2
    NCCL_INT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 4, 6, 7, 8, 9
    TYPES = {  # noqa: RUF012
        0: torch.int8,
        1: torch.uint8,
        2: torch.int32,
        4: torch.int64,
        6: torch.float16,
        7: torch.float32,
        8: torch.float64,
        9: torch.bfloat16,
    }

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.group: list[Callable[[], None]] | None = None
        self.sends: dict[int, bytes] = {}
        self.receives: list[tuple[int, int, int]] = []
        self.wires: Communicator | None = None
        self.kept: list[tuple[int, int]] = []  # memory that the allocator keeps for the verb under way, [from, to)
        self.streams = self.events = 0  # how many there are
        self.happened = True  # whether events that are recorded from now on have happened

    def note(self, *call: Any) -> None:
        self.calls.append(call)

    def expect_kept(self, at: int, size: int) -> None:
        assert any(start <= at and at + size <= end for start, end in self.kept), "nobody keeps this memory"

    def groupStart(self) -> None:
        self.note("groupStart")
        self.group = []

    def groupEnd(self) -> None:
        """All sends of the group meet all receives, then its broadcasts run."""
        self.note("groupEnd")
        assert self.wires is not None and self.group is not None
        sent = self.wires.gather_objects(self.sends)
        for at, size, peer in self.receives:
            data = sent[peer][self.wires.rank]
            assert len(data) == size, "a receive of another size than its send"
            ctypes.memmove(at, data, size)
        for job in self.group:
            job()
        self.group, self.sends, self.receives = None, {}, []


class Handle:
    """CuPy's NcclCommunicator."""

    def __init__(self, nccl: StandIn, wires: Communicator) -> None:
        self.nccl, self.wires = nccl, wires
        self.ended = ""
        self.error: Exception | None = None

    def memory(self, at: int, count: int, kind: int) -> Tensor:
        dtype = StandIn.TYPES[kind]
        self.nccl.expect_kept(at, count * dtype.itemsize)
        return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(at), dtype=dtype)

    def allReduce(self, send: int, recv: int, count: int, kind: int, op: int, stream: int) -> None:
        self.nccl.note("allReduce", count, kind, op, stream)
        x = self.memory(send, count, kind).clone()
        if op in (StandIn.NCCL_MAX, StandIn.NCCL_MIN) and x.is_floating_point():
            x[x.isnan()] = -torch.inf if op == StandIn.NCCL_MAX else torch.inf  # as NCCL does: NaN is dropped
        names = {StandIn.NCCL_SUM: "sum", StandIn.NCCL_MAX: "max", StandIn.NCCL_MIN: "min"}
        self.memory(recv, count, kind).copy_(self.wires.all_reduce(x, names[op]).wait())

    def reduceScatter(self, send: int, recv: int, count: int, kind: int, op: int, stream: int) -> None:
        self.nccl.note("reduceScatter", count, kind, op, stream)
        x = self.memory(send, count * self.wires.world_size, kind)
        self.memory(recv, count, kind).copy_(self.wires.reduce_scatter(x).wait())

    def allGather(self, send: int, recv: int, count: int, kind: int, stream: int) -> None:
        self.nccl.note("allGather", count, kind, stream)
        x = self.memory(send, count, kind)
        self.memory(recv, count * self.wires.world_size, kind).copy_(self.wires.all_gather(x).wait())

    def broadcast(self, send: int, recv: int, count: int, kind: int, root: int, stream: int) -> None:
        self.nccl.note("broadcast", count, kind, root, stream)

        def job() -> None:
            x = self.memory(send, count, kind).clone()
            self.memory(recv, count, kind).copy_(self.wires.broadcast(x, root=root).wait())

        job() if self.nccl.group is None else self.nccl.group.append(job)

    def send(self, at: int, count: int, kind: int, peer: int, stream: int) -> None:
        self.nccl.note("send", count, kind, peer, stream)
        assert self.nccl.group is not None, "a send outside a group waits for ever"
        self.nccl.sends[peer] = bytes(self.memory(at, count, kind).numpy().tobytes())

    def recv(self, at: int, count: int, kind: int, peer: int, stream: int) -> None:
        self.nccl.note("recv", count, kind, peer, stream)
        self.nccl.expect_kept(at, count)
        self.nccl.receives.append((at, count, peer))

    def commSplit(self, color: int, key: int) -> Handle:
        self.nccl.note("commSplit", color, key)
        everyone = self.wires.gather_objects((color, key))
        colors = sorted({one for one, _ in everyone})
        groups = [
            sorted((r for r, (c, _) in enumerate(everyone) if c == one), key=lambda r: everyone[r][1]) for one in colors
        ]
        return Handle(self.nccl, self.wires.split(groups))

    def check_async_error(self) -> None:
        if self.error is not None:
            raise self.error

    def destroy(self) -> None:
        assert not self.ended
        self.ended = "destroyed"

    def abort(self) -> None:
        assert not self.ended
        self.ended = "aborted"


# ---- torch.cuda, for the rank whose thread asks


class _Rank(threading.local):
    nccl: StandIn | None = None  # None in threads that are no rank: the watchdog's


_rank = _Rank()


def note(*call: Any) -> None:
    if _rank.nccl is not None:
        _rank.nccl.note(*call)


class Stream:
    """torch.cuda.Stream; there is no more of it than what may be asked without a wait of the host."""

    def __init__(self, device: torch.device | None = None, priority: int = 0, *, cuda_stream: int = 0) -> None:
        if not cuda_stream and _rank.nccl is not None:
            cuda_stream = STREAM + _rank.nccl.streams
            _rank.nccl.streams += 1
        self.cuda_stream = cuda_stream

    def wait_stream(self, other: Stream) -> None:
        note("wait_stream", self.cuda_stream, other.cuda_stream)

    def wait_event(self, event: Event) -> None:
        note("wait_event", self.cuda_stream, event.number)

    def synchronize(self) -> None:
        note("synchronize", self.cuda_stream)


class Event:
    """torch.cuda.Event: one that was never recorded has happened, as CUDA says."""

    def __init__(self) -> None:
        self.number, self.happened = -1, True

    def record(self, stream: Stream | None = None) -> None:
        assert _rank.nccl is not None
        self.number, self.happened = _rank.nccl.events, _rank.nccl.happened
        _rank.nccl.events += 1
        note("record", self.number, CURRENT if stream is None else stream.cuda_stream)

    def query(self) -> bool:
        note("query", self.number)
        return self.happened


def current_stream(device: torch.device | None = None) -> Stream:
    return Stream(device, cuda_stream=CURRENT)


def record_stream(x: Tensor, stream: Stream) -> None:
    assert _rank.nccl is not None
    _rank.nccl.kept.append((x.data_ptr(), x.data_ptr() + x.nbytes))
    note("record_stream", tuple(x.shape), stream.cuda_stream)


# ---- the communicator under test


class Standing(CupyNcclCommunicator):
    """Tells the stand-in whose verb it is: groups of NCCL belong to no communicator."""

    def _run(self, call: Any, issue: Any, finish: Any, *tensors: Tensor) -> Any:
        self._session.nccl.wires, self._session.nccl.kept = self.handle.wires, []
        return super()._run(call, issue, finish, *tensors)


class Unwatched(Session):
    """Without a thread: the test looks."""

    def _start(self) -> None:
        pass


def stand(comm: Communicator, *, timeout: float = 60.0, watched: bool = True) -> Standing:
    """The communicator under test over the stand-in, for one rank of a world of threads; torch.cuda is patched."""
    nccl = _rank.nccl = StandIn()
    handle = Handle(nccl, comm.split([list(range(comm.world_size))]))
    session = (Session if watched else Unwatched)(nccl, timeout=timeout)
    device = torch.device("cpu")
    return Standing(handle, session=session, streams=Streams(device), control=comm, device=device)


Stand = Callable[..., Standing]
