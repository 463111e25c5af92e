"""Communication inside one process: a world of one rank, and many ranks as threads for tests and notebooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from plsc.comm.communicator import Call, CommError, Communicator, Work, disagreement, ranks_text, reduce_parts

T = TypeVar("T")


class LocalCommunicator(Communicator):
    """A world of one: every verb is the identity or a copy. Takes tensors of any device."""

    any_device = True

    def __init__(self, device: torch.device | str | None = None) -> None:
        """device is where modules should live: the first GPU if there is one, unless given."""
        if device is None:
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        super().__init__("local", 0, world_size=1, device=torch.device(device))

    @classmethod
    def connect(cls, *, timeout: float, init_timeout: float) -> Communicator:
        return cls()

    def _all_reduce(self, x: Tensor, op: str) -> Work[Tensor]:
        return Work.done(x)

    def _all_gather(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        return Work.done(x.clone())

    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        return Work.done(x.clone())

    def _all_to_all(self, x: Tensor, send_sizes: list[int], recv_sizes: list[int]) -> Work[Tensor]:
        return Work.done(x.clone())

    def _broadcast(self, x: Tensor, root: int) -> Work[Tensor]:
        return Work.done(x)

    def _barrier(self) -> None:
        return

    def _gather_objects(self, obj: object) -> list[Any]:
        return [obj]

    def _split(self, groups: list[list[int]]) -> Communicator:
        return LocalCommunicator(self.device)


@dataclass
class _Room:
    """What all rank threads of one run share: the lock they meet at, and who failed or has finished."""

    timeout: float
    condition: threading.Condition = field(default_factory=threading.Condition)
    failed: tuple[int, BaseException] | None = None
    finished: set[int] = field(default_factory=set)

    def fail(self, rank: int, error: BaseException) -> None:
        with self.condition:
            self.failed = self.failed or (rank, error)
            self.condition.notify_all()

    def finish(self, rank: int) -> None:
        with self.condition:
            self.finished.add(rank)
            self.condition.notify_all()

    def raise_if_failed(self) -> None:
        if self.failed is not None:
            rank, error = self.failed
            raise CommError(f"rank {rank} failed: {type(error).__name__}: {error}") from error


@dataclass
class _Slot:
    """One verb of one group: what each rank has brought to it, and the result that is computed once for all."""

    calls: dict[int, Call] = field(default_factory=dict)
    parts: dict[int, Any] = field(default_factory=dict)
    taken: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    shared: list[Any] = field(default_factory=list)

    def once(self, compute: Callable[[], T]) -> T:
        with self.lock:
            if not self.shared:
                self.shared.append(compute())
        result: T = self.shared[0]
        return result


class _Group:
    """The meeting place of one communicator's ranks: slots by the sequence number of the verb."""

    def __init__(self, room: _Room, members: Sequence[int]) -> None:
        self.room = room
        self.members = tuple(members)
        self.slots: dict[int, _Slot] = {}

    def post(self, number: int, rank: int, *, call: Call, part: Any) -> None:
        with self.room.condition:
            self.room.raise_if_failed()
            slot = self.slots.setdefault(number, _Slot())
            slot.calls[rank], slot.parts[rank] = call, part
            if len(slot.parts) == len(self.members):
                self.room.condition.notify_all()

    def collect(self, number: int, rank: int) -> _Slot:
        """Blocks until every rank has come to verb `number`, checks that they all mean the same, and gives the slot."""
        deadline = time.monotonic() + self.room.timeout
        with self.room.condition:
            slot = self.slots[number]
            while len(slot.parts) < len(self.members):
                self.room.raise_if_failed()
                where = f"{slot.calls[rank].verb} (verb {number} of rank {self.members[rank]})"
                missing = [self.members[r] for r in range(len(self.members)) if r not in slot.parts]
                gone = [member for member in missing if member in self.room.finished]
                if gone:
                    raise CommError(f"{where}: {ranks_text(gone)} finished without coming to it")
                if not self.room.condition.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise CommError(f"{where}: {ranks_text(missing)} did not come within {self.room.timeout:g} s")
            slot.taken += 1
            if slot.taken == len(self.members):
                del self.slots[number]
        different = disagreement([slot.calls[r] for r in range(len(self.members))], self.members)
        if different:
            raise CommError(f"{slot.calls[rank].verb} (verb {number}): {different}")
        return slot


class ThreadCommunicator(Communicator):
    """A rank that is a thread, made by run_ranks; CPU only, since autograd has one thread a GPU.

    Verbs post a copy and return; wait() meets the other ranks. Reductions run in rank order, so every rank gets the
    same bits; float16 and bfloat16 accumulate in float32 and round once. Mismatched calls are always detected.
    """

    def __init__(self, group: _Group, rank: int) -> None:
        size = len(group.members)
        super().__init__("threads", rank, world_size=size, device=torch.device("cpu"), members=group.members)
        self._group = group
        self._number = 0

    def _issue(self, call: Call, part: Any, finish: Callable[[_Slot, list[Any]], T]) -> Work[T]:
        """Posts this rank's part of the next verb; finish(slot, parts by rank) makes the result."""
        number, self._number = self._number, self._number + 1
        self._group.post(number, self.rank, call=call, part=part)

        def wait() -> T:
            slot = self._group.collect(number, self.rank)
            return finish(slot, [slot.parts[rank] for rank in range(self.world_size)])

        return Work(wait)

    def _all_reduce(self, x: Tensor, op: str) -> Work[Tensor]:
        def finish(slot: _Slot, parts: list[Tensor]) -> Tensor:
            return x.copy_(slot.once(lambda: reduce_parts(parts, op)))

        return self._issue(Call.of("all_reduce", x, op=op), x.clone(), finish)

    def _all_gather(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        call = Call.of("all_gather", x, sizes=sizes)
        return self._issue(call, x.clone(), lambda _, parts: torch.cat(parts))

    def _reduce_scatter(self, x: Tensor, sizes: list[int]) -> Work[Tensor]:
        start = sum(sizes[: self.rank])
        stop = start + sizes[self.rank]
        call = Call.of("reduce_scatter", x, sizes=sizes)
        return self._issue(call, x.clone(), lambda _, parts: reduce_parts([part[start:stop] for part in parts], "sum"))

    def _all_to_all(self, x: Tensor, send_sizes: list[int], recv_sizes: list[int]) -> Work[Tensor]:
        call = Call.of("all_to_all", x, send_sizes=send_sizes, recv_sizes=recv_sizes)
        return self._issue(
            call, x.clone().split(send_sizes), lambda _, parts: torch.cat([part[self.rank] for part in parts])
        )

    def _broadcast(self, x: Tensor, root: int) -> Work[Tensor]:
        part = x.clone() if self.rank == root else None
        return self._issue(Call.of("broadcast", x, root=root), part, lambda _, parts: x.copy_(parts[root]))

    def _barrier(self) -> None:
        self._issue(Call("barrier"), None, lambda _, parts: None).wait()

    def _gather_objects(self, obj: object) -> list[Any]:
        return self._issue(Call("gather_objects"), obj, lambda _, parts: parts).wait()

    def _split(self, groups: list[list[int]]) -> Communicator:
        """The same objects stand for the new groups on every rank: the first to arrive makes them."""

        def finish(slot: _Slot, parts: list[Any]) -> Communicator:
            made = slot.once(lambda: [_Group(self._group.room, [self.members[r] for r in group]) for group in groups])
            index = next(i for i, group in enumerate(groups) if self.rank in group)
            return ThreadCommunicator(made[index], groups[index].index(self.rank))

        return self._issue(Call("split", groups=tuple(map(tuple, groups))), None, finish).wait()


_thread = threading.local()  # .comm is the communicator of the rank that this thread is


def thread_rank() -> Communicator | None:
    """The communicator of the rank that the calling thread is, None outside run_ranks."""
    comm: Communicator | None = getattr(_thread, "comm", None)
    return comm


def run_ranks(world_size: int, fn: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
    """Calls fn(comm, *args) on world_size ranks, each a thread of this process; returns their results in rank order.

    An exception in one rank ends the verbs of the others and is raised here. timeout (seconds) bounds one verb.
    Ranks share torch's default random generator: draw from a torch.Generator of the rank's own.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: got world_size {world_size}, expected at least 1")
    room = _Room(timeout)
    group = _Group(room, range(world_size))
    results: list[Any] = [None] * world_size

    def body(rank: int) -> None:
        _thread.comm = ThreadCommunicator(group, rank)
        try:
            results[rank] = fn(_thread.comm, *args)
            room.finish(rank)
        except BaseException as error:
            room.fail(rank, error)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    try:
        with room.condition:
            room.condition.wait_for(lambda: room.failed is not None or len(room.finished) == world_size)
    except BaseException as error:  # an interrupt of the caller ends the ranks, too
        room.fail(-1, error)
        raise
    deadline = time.monotonic() + timeout
    for thread in threads:  # after a failure a rank deep in a computation of its own is not waited for for ever
        thread.join(max(0.0, deadline - time.monotonic()))
    if room.failed is not None:
        raise room.failed[1]
    return results
