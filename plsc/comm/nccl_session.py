"""What NCCL communicators split from one another share: the stream of their verbs, the watchdog, the one failure."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plsc.comm.communicator import Call, CommError
from plsc.comm.heartbeat import Heartbeat

log = logging.getLogger(__name__)

POLL = 0.2  # seconds between two looks of the watchdog
END = 10.0  # seconds to wait for its last look, which may ask who is to blame; an abort may never return


class Streams:
    """The stream that verbs run on, and how it and the caller's wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device, priority=-1)

    def run(self, issue: Callable[[int], None], tensors: Sequence[Tensor]) -> Any:
        """Issues behind what the current stream has queued; gives the event of its end. Tensors outlive it."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            tensor.record_stream(self.side)  # else the allocator gives their memory away when the caller lets go
        issue(self.side.cuda_stream)
        event = torch.cuda.Event()
        event.record(self.side)
        return event

    def lane(self) -> Streams:
        """Another stream for verbs, beside this one."""
        return Streams(self.device)

    def wait(self, event: Any) -> None:
        """Orders the current stream behind an event; the host goes on."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def synchronize(self) -> None:
        """Blocks the host until all of both streams is done."""
        torch.cuda.current_stream(self.device).synchronize()
        self.side.synchronize()


class Watched(Protocol):
    """What the watchdog needs of a communicator: its NCCL handle, and the words of a failure."""

    handle: Any
    label: str

    def failed(self, call: Call, number: int, why: str) -> CommError:
        """The error of a verb, with what is known of the other ranks."""
        ...


@dataclass(eq=False)
class _Verb:
    """A verb under way; its event is there once the host has issued it, which may take as long as it likes, too."""

    comm: Watched
    call: Call
    number: int
    deadline: float
    event: Any = None


class Session:
    """What communicators split from one another share: the watchdog, and the failure that ends all of them."""

    def __init__(self, nccl: Any, *, timeout: float, heartbeat: Heartbeat | None = None) -> None:
        self.nccl, self.timeout, self.heartbeat = nccl, timeout, heartbeat
        self.lock = threading.Lock()  # no handle is destroyed while the watchdog looks at it
        self.failure: CommError | None = None
        self._comms: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._pending: list[_Verb] = []  # the oldest first
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    def enter(self, comm: Watched) -> None:
        """The watchdog lives until every communicator that has entered has left."""
        with self.lock:
            self.raise_if_failed()
            self._comms.add(comm)

    def leave(self, comm: Watched) -> None:
        """Destroys a communicator, whose verbs are done or no longer of interest."""
        try:
            with self.lock:
                self._comms.discard(comm)
                self._pending = [verb for verb in self._pending if verb.comm is not comm]
                if self.failure is None:
                    comm.handle.destroy()
        finally:
            if not self._comms:
                self.stop()

    def watch(self, call: Call, number: int, comm: Watched) -> _Verb:
        """From now on a verb must end in time, and so must the host's calls that issue it."""
        with self.lock:
            self.raise_if_failed()
            verb = _Verb(comm, call, number, time.monotonic() + self.timeout)
            self._pending.append(verb)
            if self._thread is None:
                self._start()
        return verb

    def look(self, now: float) -> None:
        """Forgets the verbs that are done; an overdue one, or any error, is everybody's failure."""
        try:
            with self.lock:
                fault = self._find_fault(now)
            if fault is not None:
                verb, why = fault
                self.fail(verb.comm.failed(verb.call, verb.number, why))
        except Exception as error:  # a watchdog that died unseen would watch nothing
            self.fail(CommError(f"NCCL's verbs cannot be watched any more: {failure_text(error)}"))

    def fail(self, failure: CommError) -> CommError:
        """Aborts all communicators, for one that lives on could hang the device for ever; gives the first failure."""
        with self.lock:
            if self.failure is not None:
                return self.failure
            self.failure = failure  # from now on nothing is destroyed
            comms = list(self._comms)
            self._pending.clear()
        log.error("%s", failure)
        for comm in comms:
            try:
                comm.handle.abort()
            except Exception as error:
                log.error("NCCL's communicator %s could not be aborted: %s", comm.label, failure_text(error))
        return failure

    def stop(self) -> None:
        """Ends the watchdog: Python must not end while a thread of its own is in CUDA."""
        self._end.set()
        atexit.unregister(self.stop)
        if self._thread is not None:
            self._thread.join(END)

    def _find_fault(self, now: float) -> tuple[_Verb, str] | None:
        left = []
        for verb in self._pending:
            try:
                if verb.event is None or not verb.event.query():
                    verb.comm.handle.check_async_error()
                    left.append(verb)
            except Exception as error:
                return verb, failure_text(error)
        self._pending = left
        if left and now > left[0].deadline:
            return left[0], f"not finished within {self.timeout:g} s"
        return None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="plsc nccl watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _run(self) -> None:
        while not self._end.wait(POLL) and self.failure is None:
            self.look(time.monotonic())


def failure_text(error: Exception) -> str:
    return str(error) or type(error).__name__
