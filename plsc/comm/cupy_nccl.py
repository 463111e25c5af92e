"""NCCL between GPUs through CuPy: the verbs on torch's CUDA tensors, while rendezvous and objects travel over gloo.

Verbs run on one stream of their own, in the order they are issued: communicators of parts of the ranks never run at the
same time, so that ranks that issue the same verbs in the same order cannot deadlock. A split into one group of all
ranks is a lane: it has a stream of its own, its verbs run beside the others, and NCCL starts them in the order they are
issued (NCCL_LAUNCH_ORDER_IMPLICIT, NCCL 2.26 or newer; older ones may deadlock). Another library's NCCL communicators
(those of DistributedDataParallel over "nccl") know nothing of that order: let ours average the gradients, or let none
be in flight when the other's verbs are issued.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch  # before CuPy, always: the other way round CuPy's libraries break torch's
import torch.distributed as dist
from torch import Tensor

from plsc.comm.communicator import Call, CommError, Communicator, Work, reduce_parts
from plsc.comm.nccl_session import Session, Streams, failure_text
from plsc.comm.torch_distributed import GlooCommunicator, NcclCommunicator, TorchCommunicator

T = TypeVar("T")


def load_nccl() -> Any:
    """CuPy's NCCL module, or a ValueError that says what is missing or does not fit."""
    if not torch.cuda.is_available():
        raise ValueError("backend 'cupy_nccl': found no GPU; use connect('gloo')")
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ValueError(
            f"backend 'cupy_nccl' needs CuPy ({error}); pip install cupy-cuda13x (or -cuda12x), or use connect('nccl')"
        ) from error
    if not nccl.available:
        raise ValueError("backend 'cupy_nccl': CuPy finds no libnccl.so.2; pip install nvidia-nccl-cu13 (or -cu12)")
    if not hasattr(nccl, "NCCL_BFLOAT16") or not hasattr(nccl.NcclCommunicator, "commSplit"):
        raise ValueError("backend 'cupy_nccl': got an older CuPy, expected 14 or newer; pip install -U cupy-cuda13x")
    check_version(nccl.get_version(), torch.cuda.nccl.version())
    return nccl


def check_version(cupys: int, torchs: Sequence[int]) -> None:
    """CuPy and torch must have loaded one libnccl: two in a process have broken each other. cupys: as 22803."""
    theirs = (cupys // 10000, cupys // 100 % 100, cupys % 100)
    if theirs != tuple(torchs)[:3]:
        raise ValueError(
            f"CuPy has loaded NCCL {'.'.join(map(str, theirs))} but torch uses {'.'.join(map(str, torchs))}: two "
            "libraries in one process; import torch before cupy, and uninstall the nvidia-nccl package that torch did "
            "not ask for"
        )


def open_handle(nccl: Any, store: dist.Store, rank: int, world_size: int) -> Any:
    """A NcclCommunicator of CuPy's between ranks that meet in a store; binds to the current device."""
    if rank == 0:
        store.set("unique_id", nccl.get_unique_id())  # 128 bytes; torch declares text, and takes bytes
    return nccl.NcclCommunicator(world_size, store.get("unique_id"), rank)


def in_time(seconds: float, fn: Callable[[], T]) -> T:
    """What fn gives, or a CommError after so many seconds: NCCL waits for the other ranks without an end."""
    done: list[T] = []
    wrong: list[Exception] = []

    def run() -> None:
        try:
            done.append(fn())
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=run, name="plsc nccl start", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise CommError(
            f"NCCL did not connect the ranks within {seconds:g} s; see that all of them call connect('cupy_nccl') and "
            "that their GPUs reach each other (NCCL_DEBUG=INFO tells more)"
        )
    if wrong:
        raise CommError(f"NCCL could not connect the ranks: {wrong[0]}") from wrong[0]
    return done[0]


class CupyNcclCommunicator(Communicator):
    """One process a GPU. wait() orders the current stream after the verb and does not block the host.

    A verb that fails or takes longer than `timeout` aborts every communicator of the process; the next verb or wait()
    raises CommError, which names the rank that is gone or behind.
    """

    def __init__(
        self,
        handle: Any,
        *,
        session: Session,
        streams: Any,
        control: Communicator,
        device: torch.device,
        label: str = "world",
    ) -> None:
        """handle: CuPy's communicator; control: one of the same ranks for CPU tensors, which this one closes."""
        super().__init__(
            "cupy_nccl", control.rank, world_size=control.world_size, device=device, members=control.members
        )
        self.handle, self._session, self._streams = handle, session, streams
        self._control, self.label = control, label
        self._number = self._splits = 0
        nccl = session.nccl
        self._types = {
            torch.float32: nccl.NCCL_FLOAT32,
            torch.float64: nccl.NCCL_FLOAT64,
            torch.float16: nccl.NCCL_FLOAT16,
            torch.bfloat16: nccl.NCCL_BFLOAT16,
            torch.int8: nccl.NCCL_INT8,
            torch.uint8: nccl.NCCL_UINT8,
            torch.int32: nccl.NCCL_INT32,
            torch.int64: nccl.NCCL_INT64,
        }
        self._ops = {"sum": nccl.NCCL_SUM, "max": nccl.NCCL_MAX, "min": nccl.NCCL_MIN}
        session.enter(self)

    @classmethod
    def connect(cls, *, timeout: float, init_timeout: float) -> Communicator:
        nccl = load_nccl()
        device = NcclCommunicator._find_device()
        control = GlooCommunicator.connect(timeout=timeout, init_timeout=init_timeout)
        assert isinstance(control, TorchCommunicator)
        store = dist.PrefixStore("cupy_nccl", control._session.store)
        os.environ.setdefault(
            "NCCL_LAUNCH_ORDER_IMPLICIT", "1"
        )  # for lanes; read when NCCL opens its first communicator

        def open_here() -> Any:
            torch.cuda.set_device(device)  # of this thread, too
            return open_handle(nccl, store, control.rank, control.world_size)

        handle = in_time(init_timeout, open_here)
        session = Session(nccl, timeout=timeout, heartbeat=control._session.heartbeat)
        return cls(handle, session=session, streams=Streams(device), control=control, device=device)

    # ---- the verbs

    def _all_reduce(self, x: Tensor, op: str) -> Work[Tensor]:
        call = Call.of("all_reduce", x, op=op)
        if op == "sum" or not x.is_floating_point():
            return self._run(call, lambda stream: self._reduce_in_place(x, op, stream), lambda: x, x)
        # NCCL drops NaN from a maximum: beside the values travels where they are.
        worst, sign = (-torch.inf, 1.0) if op == "max" else (torch.inf, -1.0)
        nan = x.isnan()
        pair = torch.stack([x.masked_fill(nan, worst), nan.to(x.dtype) * sign])  # [2, ...]

        def finish() -> Tensor:
            return x.copy_(pair[0].masked_fill_(pair[1] != 0, torch.nan))

        return self._run(call, lambda stream: self._reduce_in_place(pair, op, stream), finish, pair)

    def _reduce_in_place(self, x: Tensor, op: str, stream: int) -> None:
        if x.numel():
            at = x.data_ptr()
            self.handle.allReduce(at, at, x.numel(), self._types[x.dtype], self._ops[op], stream)

    def _all_gather(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        """As bytes, so every dtype passes; uneven rows are one broadcast a rank, in a group."""
        received = x.new_empty(sum(sizes), *x.shape[1:])
        ends, nccl = _byte_ends(received, sizes), self._session.nccl

        def issue(stream: int) -> None:
            if min(sizes) == max(sizes):
                if received.numel():
                    self.handle.allGather(x.data_ptr(), received.data_ptr(), ends[1], nccl.NCCL_UINT8, stream)
                return
            with _Group(nccl):
                for root in range(self.world_size):
                    size = ends[root + 1] - ends[root]
                    if size:
                        to = received.data_ptr() + ends[root]
                        source = x.data_ptr() if root == self.rank else to
                        self.handle.broadcast(source, to, size, nccl.NCCL_UINT8, root, stream)

        return self._run(Call.of("all_gather", x, sizes=sizes), issue, lambda: received, x, received)

    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        """NCCL's own where rows are even; half types are sent apart and added in float32, so that they round once."""
        call, rows = Call.of("reduce_scatter", x, sizes=sizes), sizes[self.rank]
        if min(sizes) == max(sizes) and x.dtype not in (torch.float16, torch.bfloat16):
            received = x.new_empty(rows, *x.shape[1:])

            def issue(stream: int) -> None:
                if x.numel():
                    kind = self._types[x.dtype]
                    to, count = received.data_ptr(), received.numel()
                    self.handle.reduceScatter(x.data_ptr(), to, count, kind, self._ops["sum"], stream)

            return self._run(call, issue, lambda: received, x, received)
        parts = x.new_empty(self.world_size, rows, *x.shape[1:])
        flat = parts.view(self.world_size * rows, *x.shape[1:])
        return self._run(
            call,
            lambda stream: self._exchange(flat, x, [rows] * self.world_size, sizes, stream),
            lambda: reduce_parts(parts.unbind(0), "sum"),
            x,
            parts,
        )

    def _all_to_all(self, x: Tensor, send_sizes: list[int], recv_sizes: list[int]) -> Work[Tensor]:
        received = x.new_empty(sum(recv_sizes), *x.shape[1:])
        call = Call.of("all_to_all", x, send_sizes=send_sizes, recv_sizes=recv_sizes)
        return self._run(
            call,
            lambda stream: self._exchange(received, x, recv_sizes, send_sizes, stream),
            lambda: received,
            x,
            received,
        )

    def _exchange(self, to: Tensor, x: Tensor, recv_sizes: list[int], send_sizes: list[int], stream: int) -> None:
        """NCCL has no all_to_all: one group of sends and receives, as bytes."""
        sent, received, nccl = _byte_ends(x, send_sizes), _byte_ends(to, recv_sizes), self._session.nccl
        with _Group(nccl):
            for peer in range(self.world_size):
                out, back = sent[peer + 1] - sent[peer], received[peer + 1] - received[peer]
                if out:
                    self.handle.send(x.data_ptr() + sent[peer], out, nccl.NCCL_UINT8, peer, stream)
                if back:
                    self.handle.recv(to.data_ptr() + received[peer], back, nccl.NCCL_UINT8, peer, stream)

    def _broadcast(self, x: Tensor, root: int) -> Work[Tensor]:
        def issue(stream: int) -> None:
            size = x.numel() * x.element_size()
            if size:
                self.handle.broadcast(x.data_ptr(), x.data_ptr(), size, self._session.nccl.NCCL_UINT8, root, stream)

        return self._run(Call.of("broadcast", x, root=root), issue, lambda: x, x)

    def _barrier(self) -> None:
        self._drain("barrier")
        self._control.barrier()

    def _gather_objects(self, obj: object) -> list[Any]:
        return self._control.gather_objects(obj)

    def _split(self, groups: list[list[int]]) -> Communicator:
        """NCCL wants nothing in flight on the communicator that is split. One group of all ranks is a lane."""
        self._session.raise_if_failed()
        index = next(i for i, group in enumerate(groups) if self.rank in group)
        label = f"{self.label}/{self._splits}.{index}"
        self._splits += 1
        control = self._control.split(groups)
        self._drain("split")
        streams = self._streams.lane() if len(groups) == 1 else self._streams

        def split_here() -> Any:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread, too
            return self.handle.commSplit(index, groups[index].index(self.rank))

        try:
            handle = in_time(self._session.timeout, split_here)
        except CommError as error:
            raise self._session.fail(error) from error
        kept = {"session": self._session, "streams": streams, "control": control}
        return type(self)(handle, device=self.device, label=label, **kept)

    def close(self) -> None:
        """Lets go of NCCL's communicator after its last verb; of the world's, of the ranks' connections too."""
        if self.closed:
            return
        super().close()
        session = self._session
        with ExitStack() as ends:  # all of them, the last first, whichever fails
            ends.callback(self._control.close)
            if session.heartbeat is not None:
                ends.callback(session.heartbeat.forget, self._key)
            ends.callback(session.leave, self)
            if session.failure is None:
                self._drain("close")

    # ---- failures

    def failed(self, call: Call, number: int, why: str) -> CommError:
        """What to raise for a verb, with who is to blame as far as the signs of life tell."""
        heartbeat = self._session.heartbeat
        who = "" if heartbeat is None else f": {heartbeat.explain(self._key, self.members)}"
        where = "" if self.label == "world" else f" among ranks {list(self.members)}"
        return CommError(f"{call} (verb {number} of rank {self.members[self.rank]}{where}) failed{who}. Cause: {why}")

    @property
    def _key(self) -> str:
        return f"cupy_nccl/{self.label}"

    def _run(self, call: Call, issue: Callable[[int], None], finish: Callable[[], T], *tensors: Tensor) -> Work[T]:
        """Issues a verb on the stream of verbs; finish() makes the result, on the caller's stream."""
        session = self._session
        session.raise_if_failed()
        number, self._number = self._number, self._number + 1
        if session.heartbeat is not None:
            session.heartbeat.note(self._key, number, call)
        verb = session.watch(call, number, self)
        try:
            verb.event = self._streams.run(issue, tensors)
        except Exception as error:
            raise self._give_up(call, number, error) from error
        session.raise_if_failed()  # what ended the host's call may have been an abort

        def wait() -> T:
            session.raise_if_failed()
            self._streams.wait(verb.event)
            return finish()

        return Work(wait)

    def _drain(self, verb: str) -> None:
        """Blocks the host until the caller's stream and that of verbs are done."""
        self._session.raise_if_failed()
        try:
            self._streams.synchronize()
        except Exception as error:
            raise self._give_up(Call(verb), self._number, error) from error
        self._session.raise_if_failed()  # what ended the wait may have been an abort

    def _give_up(self, call: Call, number: int, error: Exception) -> CommError:
        """What to raise: the failure that led to this error, or this one, which is everybody's from now on."""
        session = self._session
        return session.failure or session.fail(self.failed(call, number, failure_text(error)))


class _Group:
    """NCCL calls that are one: none of them waits for another."""

    def __init__(self, nccl: Any) -> None:
        self._nccl = nccl

    def __enter__(self) -> None:
        self._nccl.groupStart()

    def __exit__(self, *_: object) -> None:
        self._nccl.groupEnd()


def _byte_ends(x: Tensor, sizes: Sequence[int]) -> list[int]:
    """Where each rank's rows begin in the memory of x, in bytes; and where the last end."""
    row = x.shape[1:].numel() * x.element_size()
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size * row)
    return ends
