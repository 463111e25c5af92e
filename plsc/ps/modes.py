"""How a worker's pushes reach a shared store: at once, merged behind its back, in rounds, or as a copy's moves."""

import atexit
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from plsc.ps.arrays import Array, as_floats, as_keys
from plsc.ps.merging import merge
from plsc.ps.rules import PythonRule, Rule
from plsc.ps.store import SharedStore, Store


@dataclass
class Push:
    """What waits to be sent: a push, or (Geo) keys whose rows have moved, and in how many steps each."""

    keys: np.ndarray
    grads: np.ndarray | None = None
    shows: np.ndarray | None = None
    clicks: np.ndarray | None = None
    steps: np.ndarray | None = None


MOST_WORKERS = 65_535  # of a round, as a message counts them


class Communicator:
    """A store around a store, for all threads of a process: pushes are queued, merged by key and sent by one sender.

    The modes are settings of this one machine:

    merge      pushes that go out as one
    linger     seconds that the sender waits for more to merge; None: until there are `merge`, or somebody flushes
    queue      pushes that may wait; then push waits
    staleness  None, or: pull waits while more than so many of this process's pushes are not applied
    barrier    None, or: every so many pushes, push waits until all are applied

    An error of the sender is raised by the next pull, push or flush.
    """

    averages = False  # True: what a worker pushes is divided by the number of workers

    def __init__(
        self,
        store: Store,
        *,
        merge: int = 1,
        linger: float | None = 0.0,
        queue: int = 16,
        staleness: int | None = None,
        barrier: int | None = None,
    ) -> None:
        for name, value, least in (("merge", merge, 1), ("queue", queue, 1), ("barrier", barrier, 1)):
            if value is not None and value < least:
                raise ValueError(f"{name}: got {value}, expected {least} or more")
        if staleness is not None and staleness < 0:
            raise ValueError(f"staleness: got {staleness}, expected 0 or more, or None for no bound")
        self.store = store
        self.refused = 0  # gradients that the store would not take: they held a NaN or an infinity
        self.sends = 0
        self._merge, self._linger, self._queue_size = merge, linger, max(queue, merge)
        self._staleness, self._barrier = staleness, barrier
        self._waiting: deque[Push] = deque()
        self._put = self._done = 0
        self._goal = 0  # so many pushes somebody waits for: the sender waits for no more to merge with them
        self._closed = False
        self._error: BaseException | None = None
        self._moved = threading.Condition()
        self._sender: threading.Thread | None = None

    # ---- the face of a store

    @property
    def dim(self) -> int:
        return self.store.dim

    @property
    def rule(self) -> Rule | PythonRule:
        return self.store.rule

    @property
    def keeps_counters(self) -> bool:
        return self.store.keeps_counters

    @property
    def keeps_rows(self) -> bool:
        return self.store.keeps_rows

    @property
    def last_save(self) -> str | None:
        return self.store.last_save

    @property
    def lr(self) -> float:
        return self.store.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self.store.lr = lr

    def pull(self, keys: Array, *, create: bool = True, out: Array | None = None) -> Array:
        with self._moved:
            self._raise()
            while self._staleness is not None and self._put - self._done > self._staleness:
                self._wait()
        return self.store.pull(keys, create=create, out=out)

    def push(self, keys: Array, grads: Array, *, shows: Array | None = None, clicks: Array | None = None) -> int:
        """Returns 0: what the store refuses later is counted in `refused`."""
        array = as_keys(keys).copy()
        floats = as_floats(grads, (len(array), self.dim), "grads").copy()
        counts = [None if x is None else as_floats(x, array.shape, "shows or clicks").copy() for x in (shows, clicks)]
        if not self.keeps_counters and (shows is not None or clicks is not None):
            raise ValueError("got shows or clicks, but this table keeps no counters; make it with counters=True")
        self.wait(self._enqueue(Push(array, floats, *counts)))
        return 0

    # ---- the machine

    @property
    def pending(self) -> int:
        """Pushes of this process that are not applied yet: how stale what it pulls may be."""
        return self._put - self._done

    def flush(self) -> None:
        """Returns once every push made so far is applied."""
        with self._moved:
            self._raise()
            self.wait(self._put)

    def close(self) -> None:
        """Sends what waits, then ends the sender; the store inside stays open. Raises what the sender failed with."""
        try:
            if not self._closed:
                self.flush()
        finally:
            with self._moved:
                self._closed = True
                self._moved.notify_all()
            if self._sender is not None:
                self._sender.join()
                atexit.unregister(self._at_exit)

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException as failure:
            if failure is not error:  # else it is on its way already
                raise

    def _enqueue(self, push: Push) -> int:
        """How many pushes `wait` is to wait for: 0 unless this one has come to the barrier."""
        with self._moved:
            self._raise()
            if self._closed:
                raise ValueError("push on a closed store; make a new one around the same store")
            if self._sender is None:
                self._start()
            while len(self._waiting) >= self._queue_size:
                self._wait()
            self._waiting.append(push)
            self._put += 1
            self._moved.notify_all()
            if self._barrier is None or self._put % self._barrier:
                return 0
            self._goal = self._put
            return self._put

    def wait(self, goal: int) -> None:
        """Returns once so many pushes of this process are applied."""
        with self._moved:
            self._goal = max(self._goal, goal)
            self._moved.notify_all()
            while self._done < goal:
                self._raise()  # the sender may have failed before anybody waited
                self._wait()

    def _start(self) -> None:
        self._sender = threading.Thread(target=self._send_all, name="plsc-ps-sender", daemon=True)
        self._sender.start()
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """A script that ends without close() has its last pushes sent all the same."""
        if not self._closed:
            self.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        self._moved.wait()
        self._raise()

    def _take(self) -> list[Push] | None:
        """The next pushes to send as one; None once closed."""
        with self._moved:
            while not self._waiting:
                if self._closed:
                    return None
                self._moved.wait()
            until = None if self._linger is None else time.monotonic() + self._linger
            while len(self._waiting) < self._merge and not (self._goal > self._done or self._closed):
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._moved.wait(left)
            # No further than the goal: what other threads push meanwhile must not decide how many sends there are.
            most = self._goal - self._done if self._goal > self._done else self._merge
            return [self._waiting.popleft() for _ in range(min(self._merge, most, len(self._waiting)))]

    def _send_all(self) -> None:
        while (taken := self._take()) is not None:
            try:
                self._deliver(taken)
            except BaseException as error:
                with self._moved:
                    self._error = error
                    self._moved.notify_all()
                return
            with self._moved:
                self.sends += 1
                self._done += len(taken)
                self._moved.notify_all()

    def _deliver(self, pushes: list[Push]) -> None:
        """One push of the merged gradients: sums by key, within a push as between several; of shows and clicks too."""
        counted = self.keeps_counters
        if self._merge == 1:  # as it came, each gradient a step of its own
            (one,) = pushes
            self.refused += self.store.push(one.keys, one.grads, shows=one.shows, clicks=one.clicks)
            return
        keys = np.concatenate([push.keys for push in pushes])
        parts = [np.concatenate([push.grads for push in pushes if push.grads is not None])]
        if counted:
            parts.append(np.concatenate([_or(push.shows, np.ones, len(push.keys)) for push in pushes]))
            parts.append(np.concatenate([_or(push.clicks, np.zeros, len(push.keys)) for push in pushes]))
        unique, sums, *counts = merge(keys, *parts)
        if not np.isfinite(sums).all():  # a bad gradient is refused alone, not with the good ones of its key
            good = np.isfinite(parts[0]).all(axis=1)
            self.refused += int((~good).sum())
            unique, sums, *counts = merge(keys[good], *(part[good] for part in parts))
        named = dict(zip(("shows", "clicks"), counts, strict=True)) if counted else {}
        self.refused += self.store.push(unique, sums, **named)


def _or(given: np.ndarray | None, make: Any, count: int) -> np.ndarray:
    return given if given is not None else make(count, np.float32)


class Direct(Communicator):
    """Every push is applied when push returns. On a Hogwild table, threads that share it need no more than this."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)

    def push(self, keys: Array, grads: Array, *, shows: Array | None = None, clicks: Array | None = None) -> int:
        return self.store.push(keys, grads, shows=shows, clicks=clicks)


class Async(Communicator):
    """Pushes leave behind the training threads' backs, up to `merge` of them as one; see Communicator.

    staleness=s bounds how many pushes of this process a pull may miss; staleness 0 with merge=1 is Direct.
    """

    def __init__(
        self, store: Store, *, merge: int = 8, linger: float = 0.002, queue: int = 16, staleness: int | None = None
    ) -> None:
        super().__init__(store, merge=merge, linger=linger, queue=queue, staleness=staleness)


class HalfAsync(Communicator):
    """Pushes leave in the background; every `every` of them (over all threads) push waits until they are applied."""

    def __init__(self, store: Store, *, every: int = 8, merge: int | None = None) -> None:
        super().__init__(store, merge=every if merge is None else merge, queue=every, barrier=every)


class Sync(Communicator):
    """Rounds: every worker's push is one part of a round, and pull waits until the rounds of this worker are applied.

    A round takes the sum of its `workers` parts divided by `workers`, as one step of the rule: as one worker with
    the batches of all. If a worker does not come within `deadline` seconds, WorkerMissing names it.
    """

    store: SharedStore
    averages = True

    def __init__(self, store: SharedStore, *, workers: int, deadline: float = 60.0) -> None:
        super().__init__(store)
        if not 1 <= workers <= MOST_WORKERS or not deadline > 0:
            raise ValueError(
                f"got workers={workers}, deadline={deadline}; expected 1 to {MOST_WORKERS}, and seconds above 0"
            )
        self.workers = workers
        self.deadline = deadline
        self._round = store.next_round

    def pull(self, keys: Array, *, create: bool = True, out: Array | None = None) -> Array:
        self.store.wait_round(self._round, deadline=self.deadline)
        return self.store.pull(keys, create=create, out=out)

    def push(self, keys: Array, grads: Array, *, shows: Array | None = None, clicks: Array | None = None) -> int:
        if shows is not None or clicks is not None:
            raise ValueError("shows and clicks go with the other modes, got them with Sync")
        array = as_keys(keys)
        floats = as_floats(grads, (len(array), self.dim), "grads")
        good = np.isfinite(floats).all(axis=1)
        if refused := int((~good).sum()):  # alone, not with what others bring of their keys
            array, floats = array[good], floats[good]
            self.refused += refused
        self.store.contribute(array, floats, round=self._round, workers=self.workers)
        self._round += 1
        return refused

    def flush(self) -> None:
        self.store.wait_round(self._round, deadline=self.deadline)
