"""Ranks that are processes, on torch.distributed's transports: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import os
import pickle
import weakref
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from plsc.comm.communicator import Call, CommError, Communicator, Work, reduce_parts
from plsc.comm.heartbeat import PATIENCE, Heartbeat, within
from plsc.comm.launch import Launch, launcher_holds_store, number_of_start

T = TypeVar("T")

log = logging.getLogger(__name__)

_sessions = itertools.count()  # sets apart the store keys of worlds that one process opens one after the other


@dataclass(frozen=True)
class _Session:
    """What a process has open with the others: shared by the world and all groups split from it."""

    store: dist.Store
    heartbeat: Heartbeat
    timeout: timedelta | None  # of one verb; None leaves what the world was started with
    init_timeout: timedelta
    owned: bool  # whether we started torch.distributed, and so end it


class TorchCommunicator(Communicator):
    """What gloo and NCCL have in common; made by connect(), adopt() or split().

    Verbs that only move data move bytes, so every dtype passes. max and min keep NaN, as torch does. A verb that
    fails raises CommError, which names the rank that is gone or behind (not on NCCL, where torch's watchdog ends the
    process instead).
    """

    backend: str  # torch's name of the transport

    def __init__(self, transport: Any, *, session: _Session, label: str, members: list[int]) -> None:
        """transport: torch's Backend object. Verbs go to it directly: groups of a split then need no registration.

        Registered groups (dist.new_group) must be created by all ranks of the world in one order, which the ranks of
        one half of a split cannot know of the other half.
        """
        rank, size = transport.rank(), transport.size()
        super().__init__(self.backend, rank, world_size=size, device=self._find_device(), members=members)
        self._transport, self._session, self._label = transport, session, label
        self._number = 0
        self._splits = 0
        _open.add(self)
        weakref.finalize(self, session.heartbeat.forget, label).atexit = False  # for those that nobody closes

    @classmethod
    @abstractmethod
    def _find_device(cls) -> torch.device:
        """Where the tensors of this process must lie."""

    @abstractmethod
    def _open(self, store: dist.Store, rank: int, size: int) -> Any:
        """A new transport between `size` ranks that meet in `store`."""

    @classmethod
    def connect(cls, *, timeout: float, init_timeout: float) -> Communicator:
        if dist.is_initialized():
            return cls._adopt(None, timedelta(seconds=init_timeout), owned=False)
        device, launch = cls._find_device(), Launch.read()
        if launch is None:
            raise ValueError(
                f"connect({cls.backend!r}): the environment names no rank; start the ranks with torchrun, or set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
            )
        try:
            dist.init_process_group(
                cls.backend,
                store=_store(launch, timedelta(seconds=init_timeout)),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timedelta(seconds=init_timeout),
                device_id=device if device.type == "cuda" else None,
            )
        except RuntimeError as error:
            where = f"{launch.address}:{launch.port}"
            if "EADDRINUSE" in str(error):
                raise CommError(
                    f"rank {launch.rank} cannot listen on {where}: the port is in use, by another run perhaps; choose "
                    "another MASTER_PORT, the same for all ranks"
                ) from error
            raise CommError(
                f"rank {launch.rank} could not join {launch.world_size} ranks at {where} within {init_timeout:g} s: "
                f"{_first_line(error)}; see that all of them run and reach that address"
            ) from error
        return cls._adopt(timedelta(seconds=timeout), timedelta(seconds=init_timeout), owned=True)

    @classmethod
    def _adopt(cls, timeout: timedelta | None, init_timeout: timedelta, *, owned: bool) -> TorchCommunicator:
        """A communicator over the initialised torch.distributed world; no communication happens."""
        device = cls._find_device()
        world = dist.group.WORLD
        assert world is not None
        try:
            transport = world._get_backend(device)
        except RuntimeError as error:
            raise ValueError(
                f"backend {cls.backend!r}: torch.distributed is initialised with {dist.get_backend()!r}; "
                f"initialise it with {cls.backend!r}, or leave that to connect()"
            ) from error
        if timeout is not None:
            transport._set_default_timeout(timeout)
        store = dist.PrefixStore(f"plsc/{number_of_start()}/{next(_sessions)}", c10d._get_default_store())
        launcher = launcher_holds_store()
        heartbeat = Heartbeat(
            store,
            dist.get_rank(),
            world_size=dist.get_world_size(),
            holds_store=not launcher and dist.get_rank() == 0,
            holder="the launcher" if launcher else "rank 0",
        )
        session = _Session(store, heartbeat, timeout, init_timeout, owned)
        return cls(transport, session=session, label="world", members=list(range(dist.get_world_size())))

    # ---- the verbs

    def _all_reduce(self, x: Tensor, op: str) -> Work[Tensor]:
        if op != "sum" and x.is_floating_point():
            return self._extreme(x, op)
        return self._run(Call.of("all_reduce", x, op=op), lambda: self._reduce_in_place(x, op), lambda: x)

    def _extreme(self, x: Tensor, op: str) -> Work[Tensor]:
        """max or min that keeps NaN, which the transports drop: beside the values travels where they are NaN."""
        worst, sign = (-torch.inf, 1.0) if op == "max" else (torch.inf, -1.0)
        nan = x.isnan()
        pair = torch.stack([x.masked_fill(nan, worst), nan.to(x.dtype) * sign])  # [2, ...]

        def finish() -> Tensor:
            return x.copy_(pair[0].masked_fill_(pair[1] != 0, torch.nan))

        return self._run(Call.of("all_reduce", x, op=op), lambda: self._reduce_in_place(pair, op), finish)

    def _reduce_in_place(self, x: Tensor, op: str) -> Any:
        options = c10d.AllreduceOptions()
        kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        options.reduceOp = dist.ReduceOp(kinds[op])
        options.asyncOp = True
        return self._transport.allreduce([x], options) if x.numel() else None

    def _all_gather(self, x: Tensor, sizes: list[int], *, verb: str = "all_gather") -> Work[Tensor]:
        """The transports want as many rows of every rank: the shorter ones are filled up, and cut after."""
        most = max(sizes)
        rest = x.shape[1:]
        sent = x if len(x) == most else torch.cat([x, x.new_empty(most - len(x), *rest)])
        received = x.new_empty(self.world_size * most, *rest)
        options = c10d.AllgatherOptions()
        options.asyncOp = True

        def issue() -> Any:
            return self._transport._allgather_base(_bytes(received), _bytes(sent), options) if sent.numel() else None

        def finish() -> Tensor:
            if min(sizes) == most:
                return received
            return torch.cat([part[:rows] for part, rows in zip(received.split(most), sizes, strict=True)])

        return self._run(Call.of(verb, x, sizes=sizes), issue, finish)

    def _all_to_all(self, x: Tensor, send_sizes: list[int], recv_sizes: list[int]) -> Work[Tensor]:
        received = x.new_empty(sum(recv_sizes), *x.shape[1:])
        call = Call.of("all_to_all", x, send_sizes=send_sizes, recv_sizes=recv_sizes)
        return self._run(call, lambda: self._exchange(received, x, recv_sizes, send_sizes), lambda: received)

    def _exchange(self, received: Tensor, sent: Tensor, recv_sizes: list[int], send_sizes: list[int]) -> Any:
        out, x = _bytes(received), _bytes(sent)
        options = c10d.AllToAllOptions()
        options.asyncOp = True
        return self._transport.alltoall_base(out, x, recv_sizes, send_sizes, options) if x.shape[1] else None

    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        """Each rank gets all parts of its rows and adds them in rank order: half types add in float32, round once."""
        rows = sizes[self.rank]
        received = x.new_empty(self.world_size, rows, *x.shape[1:])
        flat = received.view(self.world_size * rows, *x.shape[1:])
        return self._run(
            Call.of("reduce_scatter", x, sizes=sizes),
            lambda: self._exchange(flat, x, [rows] * self.world_size, sizes),
            lambda: reduce_parts(received.unbind(0), "sum"),
        )

    def _broadcast(self, x: Tensor, root: int) -> Work[Tensor]:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, True

        def issue() -> Any:
            return self._transport.broadcast([_bytes(x)], options) if x.numel() else None

        return self._run(Call.of("broadcast", x, root=root), issue, lambda: x)

    def _barrier(self) -> None:
        token = torch.ones(1, device=self.device)
        self._run(Call("barrier"), lambda: self._reduce_in_place(token, "sum"), token.item).wait()  # item: GPUs, too

    def _gather_objects(self, obj: object) -> list[Any]:
        payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(self.device)
        length = torch.tensor([len(payload)], device=self.device)
        lengths = self._all_gather(length, [1] * self.world_size, verb="gather_objects").wait().tolist()
        gathered = self._all_gather(payload, lengths, verb="gather_objects").wait().cpu()
        return [pickle.loads(part.numpy().tobytes()) for part in gathered.split(lengths)]

    def _split(self, groups: list[list[int]]) -> Communicator:
        index = next(i for i, group in enumerate(groups) if self.rank in group)
        group = groups[index]
        label = f"{self._label}/{self._splits}.{index}"
        self._splits += 1
        store = dist.PrefixStore(label, self._session.store)
        call = Call("split", groups=tuple(map(tuple, groups)))

        opened: list[Any] = []

        def issue() -> None:
            opened.append(self._open(store, group.index(self.rank), len(group)))

        def finish() -> TorchCommunicator:
            members = [self.members[rank] for rank in group]
            return type(self)(opened[0], session=self._session, label=label, members=members)

        return self._run(call, issue, finish).wait()

    def close(self) -> None:
        """Ends the signs of life, and torch.distributed too if connect() started it. Every rank should close.

        Closing a group of a split lets go of its connections only.
        """
        if self.closed:
            return
        super().close()
        self._session.heartbeat.forget(self._label)
        self._transport = None
        if self._label == "world":
            self._session.heartbeat.stop()
            if self._session.owned and dist.is_initialized():
                _ended.append(dist.group.WORLD)
                dist.destroy_process_group()

    # ---- failures

    def _run(self, call: Call, issue: Callable[[], Any], finish: Callable[[], T]) -> Work[T]:
        """Issues a verb; its torch work, if any, is waited for and then finish() makes the result."""
        number, self._number = self._number, self._number + 1
        self._session.heartbeat.note(self._label, number, call)
        try:
            work = issue()
        except RuntimeError as error:
            raise self._failure(call, number, error) from error

        def wait() -> T:
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise self._failure(call, number, error) from error
            return finish()

        return Work(wait)

    def _failure(self, call: Call, number: int, error: RuntimeError) -> CommError:
        where = "" if self._label == "world" else f" among ranks {list(self.members)}"
        who = self._session.heartbeat.explain(self._label, self.members)
        rank = self.members[self.rank]
        return CommError(f"{call} (verb {number} of rank {rank}{where}) failed: {who}. Cause: {_first_line(error)}")


class GlooCommunicator(TorchCommunicator):
    """Processes on CPUs. Half types: all_reduce rounds at every hop, reduce_scatter once."""

    backend = "gloo"

    @classmethod
    def _find_device(cls) -> torch.device:
        return torch.device("cpu")

    def _open(self, store: dist.Store, rank: int, size: int) -> Any:
        transport = dist.ProcessGroupGloo(store, rank, size, timeout=self._session.init_timeout)
        if self._session.timeout is not None:
            transport._set_default_timeout(self._session.timeout)
        return transport


class NcclCommunicator(TorchCommunicator):
    """One process a GPU. wait() orders the current stream after the verb and does not block the host."""

    backend = "nccl"

    @classmethod
    def _find_device(cls) -> torch.device:
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise ValueError("backend 'nccl': found no GPU, or a torch built without NCCL; use connect('gloo')")
        count = torch.cuda.device_count()
        world = dist.group.WORLD if dist.is_initialized() else None
        try:
            launch = Launch.read()
        except ValueError:
            if world is None:
                raise
            launch = None  # whoever initialised torch.distributed may have left half an environment
        bound = None if world is None else world.bound_device_id
        if bound is not None and bound.type == "cuda" and bound.index is not None:
            index = bound.index
        elif world is not None and torch.cuda.current_device() != 0:
            index = torch.cuda.current_device()  # chosen by whoever initialised torch.distributed
        elif count == 1:
            index = 0  # launchers may show each process its own GPU only
        elif launch is not None and launch.local_rank is not None:
            index = launch.local_rank
        else:
            index = (dist.get_rank() if world is not None else launch.rank if launch is not None else 0) % count
        if index >= count:
            raise ValueError(f"backend 'nccl': got local rank {index} but {count} GPUs; start one process a GPU")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def _open(self, store: dist.Store, rank: int, size: int) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._session.timeout or self._session.init_timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        """NCCL's own where the rows are even and no half type would round at every hop; else the exact one."""
        if min(sizes) != max(sizes) or x.dtype in (torch.float16, torch.bfloat16) or not x.numel():
            return super()._reduce_scatter(x, sizes)
        received = x.new_empty(sizes[self.rank], *x.shape[1:])
        options = c10d.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp(dist.ReduceOp.SUM), True
        return self._run(
            Call.of("reduce_scatter", x, sizes=sizes),
            lambda: self._transport._reduce_scatter_base(received, x, options),
            lambda: received,
        )


_open: weakref.WeakSet[TorchCommunicator] = weakref.WeakSet()
# Groups of worlds that were closed. torch's DDP has them as well, and frees the last reference without giving up the
# GIL: it then waits for ever for a transport's thread that needs the GIL to let go of a verb's tensors.
_ended: list[Any] = []


@atexit.register
def _end_transports() -> None:
    """Waits for the transports' own threads, of all communicators that are still open, closed in order or not.

    A verb's wait() returns a moment before torch's thread lets go of the tensors. Where that falls into Python's end,
    the thread cannot have the lock that freeing them takes, and the process aborts ("terminate called without an
    active exception"). A transport that is let go of ends its threads first.
    """

    def let_go() -> None:
        _ended.clear()
        for comm in list(_open):
            comm._transport = None
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # torch's objects refer to each other

    if _open or _ended:
        within(PATIENCE, let_go)


def adopt() -> TorchCommunicator:
    """A communicator over the torch.distributed world that somebody else has initialised."""
    backend = dist.get_backend()
    kinds: list[type[TorchCommunicator]] = [NcclCommunicator, GlooCommunicator]
    for kind in kinds:
        if kind.backend in str(backend) or (backend == "undefined" and _serves(kind)):
            return kind._adopt(None, timedelta(seconds=300), owned=False)
    raise ValueError(f"torch.distributed runs on backend {backend!r}, expected gloo or nccl")


def _store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Where the ranks meet. torch reads its predecessors' addresses in a launcher's store: each start has its own keys.

    The count of starts is one torchrun's own: with several hosts each start needs a store of its own.
    """
    held = launcher_holds_store()
    hosts, restarts = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if held and hosts != "1" and restarts != "0" and launch.rank == 0:
        log.warning(
            "torchrun cannot restart ranks on several hosts while it keeps one store for all starts; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment on every host"
        )
    store = dist.TCPStore(
        launch.address,
        int(launch.port),
        world_size=launch.world_size,
        is_master=not held and launch.rank == 0,
        timeout=timeout,
        multi_tenant=not held,
    )
    return dist.PrefixStore(f"plsc/start {number_of_start()}", store)


def _serves(kind: type[TorchCommunicator]) -> bool:
    """Whether torch's world of several backends has one of this kind that can be used here."""
    return kind is GlooCommunicator or torch.cuda.is_available()


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as rows of bytes [rows, bytes of a row]; shares it."""
    rows = x.shape[0] if x.dim() else 1
    width = x.shape[1:].numel() if x.dim() else 1
    return x.view(rows, width).view(torch.uint8)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
