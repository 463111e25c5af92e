"""Geo-SGD: a worker trains a copy of the rows it has seen and exchanges differences with the shared store."""

import threading

import numpy as np

from plsc.ps.arrays import Array, as_floats, as_keys, empty_like_kind
from plsc.ps.merging import merge
from plsc.ps.modes import Communicator, Push
from plsc.ps.rules import PythonRule, Rule
from plsc.ps.store import SharedStore
from plsc.ps.table import Table

REFRESHED = 65_536  # rows pulled at a time where a worker has fallen behind


class Geo(Communicator):
    """A local copy, stepped by `rule`; every `every` pushes what it moved by goes to the store, which adds it.

    store    a seat at a Host, or a table on servers
    every    pushes between two exchanges, or "auto": one after the other, as fast as the link allows
    rule     what steps the copy (default: the store's own rule); its state stays here. lr: default the store's
    weight   what a difference counts for; default 1 / workers
    pace     instead of a weight for all rows, one for each, by its steps since the last exchange: what part of its way
             to where it comes to rest one step takes a row; see `weights`. What was not sent is then dropped
    workers  default: how many are connected at each exchange
    rounds   True: an exchange ends when all `workers` have come to it, within `deadline` seconds, and all go on from
             the same rows (one that it meets first between two: as it is then); so all make as many exchanges.
             False: each takes what is there when it comes
    overlap  False: the push that completes `every` waits for the exchange. True: it goes on meanwhile

    `local` is the copy. Code that trains it directly tells which rows moved: `touch(keys, steps)`.
    """

    store: SharedStore
    averages = True

    def __init__(
        self,
        store: SharedStore,
        *,
        every: int | str = 100,
        rule: str | Rule | PythonRule | None = None,
        lr: float | None = None,
        weight: float | None = None,
        pace: float | None = None,
        workers: int | None = None,
        rounds: bool = False,
        deadline: float = 60.0,
        overlap: bool = False,
        locked: bool = True,
        stripes: int = 64,
    ) -> None:
        if every == "auto":
            super().__init__(store, merge=1 << 30, linger=0.0, queue=64)
            self._queue_size = 64
        elif isinstance(every, int) and every >= 1:
            super().__init__(store, merge=every, linger=None, queue=2 * every, barrier=None if overlap else every)
        else:
            raise ValueError(f"every: got {every!r}, expected a number of pushes, or 'auto'")
        if weight is not None and not 0 < weight <= 1:
            raise ValueError(f"weight: got {weight}, expected more than 0, at most 1")
        if pace is not None and (weight is not None or not 0 < pace < 1):
            raise ValueError(f"got pace={pace}, weight={weight}, expected one of them, a pace between 0 and 1")
        if workers is not None and workers < 1:
            raise ValueError(f"workers: got {workers}, expected 1 or more")
        if rounds and (workers is None or every == "auto"):
            raise ValueError(
                f"rounds: got workers={workers}, every={every!r}, expected two numbers, as all others have"
            )
        if not deadline > 0:
            raise ValueError(f"deadline: got {deadline}, expected seconds above 0")
        self.rounds, self.deadline = rounds, deadline
        self._round = store.next_round if rounds else None
        self.workers = workers
        self.weight = weight
        self.pace = pace
        chosen = store.rule if rule is None else rule
        rate = store.lr if lr is None else lr
        birth = {**store.birth(), "dtype": "fp32"}
        self.local = Table(**birth, rule=chosen, lr=rate, locked=locked, stripes=stripes)
        # What the store holds, as far as this worker knows.
        self._base = Table(**birth, rule="sgd", lr=rate, locked=locked, stripes=stripes)
        self._fetching = threading.Lock()
        self._fetched = np.empty(0, np.uint64)

    @property
    def rule(self) -> Rule | PythonRule:
        return self.local.rule

    @property
    def lr(self) -> float:
        return self.local.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self.local.lr = lr

    def pull(self, keys: Array, *, create: bool = True, out: Array | None = None) -> Array:
        """Rows of the copy; those it has not are fetched, and kept unless create is False."""
        self._raise()
        array = as_keys(keys)
        if create:
            self.fetch(array)
            return self.local.pull(keys, out=out)
        if out is None:
            out, _ = empty_like_kind(keys, (len(array), self.dim))
        rows = self.local.pull(array, create=False)
        missing = ~self.local.contains(array)
        if missing.any():
            rows[missing] = self.store.pull(array[missing], create=False)
        (out if isinstance(out, np.ndarray) else out.numpy())[:] = rows
        return out

    def fetch(self, keys: np.ndarray) -> None:
        """Has rows of these keys in the copy."""
        if np.array_equal(keys, self._fetched) or (held := self._base.contains(keys)).all():
            return
        missing = keys[~held]
        with self._fetching:
            missing = missing[~self._base.contains(missing)]  # another thread may have been here
            if len(missing):
                rows = self.store.pull(missing)
                self.local.assign(missing, rows)
                self._base.assign(missing, rows)  # last: a row that is here is in the copy
        self._fetched = keys.copy()  # a push mostly follows the pull of its keys, and rows never leave

    def push(self, keys: Array, grads: Array, *, shows: Array | None = None, clicks: Array | None = None) -> int:
        if shows is not None or clicks is not None:
            raise ValueError("shows and clicks go with the other modes, got them with Geo: the rows are stepped here")
        array = as_keys(keys)
        floats = as_floats(grads, (len(array), self.dim), "grads")
        self._raise()
        self.fetch(array)
        refused = self.local.push(array, floats)
        self.refused += refused
        self.touch(array)
        return refused

    def touch(self, keys: Array, steps: np.ndarray | None = None, *, wait: bool = True) -> int:
        """Counts as a push: the copy's rows of these keys have been trained, by whatever means.

        steps [K]: how often each row was stepped, where that was not once; `pace` is for one step. wait=False returns
        before the exchange that this push may complete; `wait` takes what it answers, so that copies exchange together.
        """
        array = as_keys(keys).copy()
        taken = None if steps is None else as_floats(steps, array.shape, "steps").copy()
        if taken is not None and not (np.isfinite(taken).all() and (taken >= 0).all()):
            raise ValueError("steps: got a negative number, a NaN or an infinity, expected how often rows were stepped")
        goal = self._enqueue(Push(array, steps=taken))
        if wait:
            self.wait(goal)
        return goal

    def _deliver(self, pushes: list[Push]) -> None:
        """One exchange: what the copy has moved by since the last one, for what others have moved."""
        taken = [np.ones(len(push.keys), np.float32) if push.steps is None else push.steps for push in pushes]
        keys, steps = merge(np.concatenate([push.keys for push in pushes]), np.concatenate(taken))
        workers = self.workers or max(1, self.store.num_workers)
        moved = self.local.pull(keys, create=False) - self._base.pull(keys, create=False)
        if self.pace is None:
            sent = moved * np.float32(1.0 / workers if self.weight is None else self.weight)
        else:
            sent = moved * weights(steps, self.pace, workers)[:, None]
            self.local.add(keys, sent - moved)  # the weight has made of it what all workers have come: no rest stays
        if self._round is None:
            changes = self.store.exchange(keys, sent)
            self._base.add(keys, changes.deltas)
        else:
            self.store.wait_round(self._round, deadline=self.deadline)  # all have taken the last rows
            self._base.add(keys, self.store.add(keys, sent))
            self._come(workers)
            self.store.wait_round(self._round, deadline=self.deadline)  # all have added
            changes = self.store.exchange(keys[:0], sent[:0])
        if changes.behind:
            self._refresh()
        else:
            held = self._base.contains(changes.keys)
            self._take_over(changes.keys[held], changes.rows[held])
        if self._round is not None:
            self._come(workers)

    def _come(self, workers: int) -> None:
        """A part of a round without rows: once all workers have come, what each did before is done."""
        assert self._round is not None
        self.store.contribute(
            np.empty(0, np.uint64), np.empty((0, self.dim), np.float32), round=self._round, workers=workers
        )
        self._round += 1

    def _take_over(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self.local.add(keys, rows - self._base.pull(keys, create=False))
        self._base.assign(keys, rows)

    def _refresh(self) -> None:
        for keys, _ in list(self._base.items()):
            for start in range(0, len(keys), REFRESHED):
                some = keys[start : start + REFRESHED]
                self._take_over(some, self.store.pull(some, create=False))


def weights(steps: np.ndarray, pace: float, workers: int) -> np.ndarray:
    """What the moves of rows count for, float32 [K], that `workers` workers have each taken so many steps with.

    A step takes a row the part `pace` of its way to where it comes to rest, so n steps take it 1 - (1 - pace)^n of it,
    and the steps of W workers, one after the other, 1 - (1 - pace)^(W n). The weight makes the W moves that much: 1
    for rows with few steps, which have come the W-fold way, and 1 / W for those that have all arrived.
    """
    rest = np.maximum(steps, 1e-9) * np.log1p(-pace)
    return (np.expm1(workers * rest) / (workers * np.expm1(rest))).astype(np.float32)
