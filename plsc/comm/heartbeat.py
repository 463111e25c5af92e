"""Signs of life: every rank writes into a store what it does, so that a verb that fails can name who is to blame."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store

from plsc.comm.communicator import Call, ranks_text

T = TypeVar("T")

log = logging.getLogger(__name__)

PERIOD = 1.0  # seconds between two signs of life of a rank
PATIENCE = 3.5  # seconds without one after which a rank counts as gone


class Heartbeat:
    """A daemon thread that writes this rank's record into the store once a second, and reads the others' on failure.

    The record: a counter that shows the thread lives, the last verb by communicator, and whether the rank has left
    (or "parted": it has heard that the store goes, and writes no more).
    The first rank that finds a culprit leaves its verdict for those whose verbs fail later, when more ranks are gone.
    """

    def __init__(self, store: Store, rank: int, *, world_size: int, holds_store: bool, holder: str) -> None:
        """store: any torch store, of which two connections of our own are made; holder: who serves it, in words."""
        self.rank, self.world_size = rank, world_size
        self._holds_store, self._holder = holds_store, holder
        # Separate connections: a blocked operation on one (the store's host may hang) must not block the others.
        self._own, self._watch = _connection(store), _connection(store)
        self._verbs: dict[str, tuple[int, Call]] = {}
        self._beat = 0
        self._verdict: str | None = None
        self._end = threading.Event()
        self._process = os.getpid()
        self._write("alive")
        self._thread = threading.Thread(target=self._run, name="plsc heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def note(self, label: str, number: int, call: Call) -> None:
        """This rank has come to verb `number` of the communicator `label`; costs a dict entry."""
        self._verbs[label] = (number, call)

    def forget(self, label: str) -> None:
        """The communicator is closed."""
        self._verbs.pop(label, None)

    def explain(self, label: str, members: Sequence[int]) -> str:
        """Who stopped the verb that has just failed on communicator `label` of `members`; takes some seconds."""
        if self._verdict is not None:
            return self._verdict
        answer = within(PATIENCE + 2.0, lambda: self._judge(label, members))
        if answer is not None:
            return answer
        if self._verdict is not None:
            return self._verdict
        return f"the store of the ranks does not answer: {self._holder}, which holds it, is gone or hangs"

    def stop(self) -> None:
        """Ends the signs of life and says so to the others. The holder of the store lets them notice before it goes."""
        if self._end.is_set() or os.getpid() != self._process:
            return
        self._end.set()
        atexit.unregister(self.stop)
        # The thread says good-bye, and hangs where the store does: each of its operations for PATIENCE at most. Waited
        # for to the end: Python aborts a process that it leaves with a thread in C++.
        self._thread.join(4 * PATIENCE)

    # ---- in the thread

    def _run(self) -> None:
        try:
            while not self._end.wait(PERIOD):
                self._write("alive")
                if self._verdict is None and self._own.check(["verdict"]):
                    self._verdict = self._own.get("verdict").decode()
                if self._own.check(["leaving"]):  # the store goes: writing on would only raise alarms
                    self._write("parted")
                    return
            self._leave()
        except Exception as error:
            log.debug("signs of life end, the store is gone: %s", error)

    def _write(self, state: str) -> None:
        self._beat += 1
        self._own.set(f"rank/{self.rank}", json.dumps(self._record(state)))

    def _record(self, state: str) -> dict[str, Any]:
        verbs = {label: [number, str(call)] for label, (number, call) in dict(self._verbs).items()}
        return {"beat": self._beat, "state": state, "verbs": verbs}

    def _leave(self) -> None:
        self._write("left")
        if self._holds_store:
            self._own.set("leaving", "1")
            deadline = time.monotonic() + 2 * PERIOD
            while time.monotonic() < deadline and any(
                record is not None and record["state"] == "alive" for record in self._read(self._own)
            ):
                time.sleep(0.05)

    # ---- after a failure

    def _read(self, store: Any) -> list[dict[str, Any] | None]:
        """The records by rank; None where a rank has not written one."""
        keys = [f"rank/{rank}" for rank in range(self.world_size)]
        if store.check(keys) and store.has_extended_api():
            return [json.loads(record) for record in store.multi_get(keys)]
        return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]

    def _judge(self, label: str, members: Sequence[int]) -> str:
        first = latest = self._read(self._watch)
        silent = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + PATIENCE
        while silent and time.monotonic() < deadline and not self._watch.check(["verdict"]):
            time.sleep(0.5)
            latest = self._read(self._watch)
            silent = [rank for rank in silent if not _lives(first[rank], latest[rank])]
        # Last: a rank gives its verdict before it goes, and must not be taken for the culprit because it has gone.
        if self._watch.check(["verdict"]):
            return str(self._watch.get("verdict").decode())
        latest[self.rank] = self._record("alive")  # ours in the store may be a beat older than the verb that failed
        blame = _blame(latest, silent, label, members=members)
        if blame is None:
            return "all ranks are alive and have come to the same verb"
        self._verdict = blame
        self._watch.set("verdict", f"{blame} (found by rank {self.rank})")
        return blame


def _connection(store: Store) -> Any:
    """A connection of our own to a store that is reached over a network; another kind of store as it is."""
    try:
        own = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
    own.set_timeout(timedelta(seconds=PATIENCE))
    return own


def _lives(before: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Whether a rank gave a sign of life between two readings, or has said that it gives no more."""
    return now is not None and (now["state"] != "alive" or before is None or now["beat"] > before["beat"])


def _blame(
    records: list[dict[str, Any] | None], silent: list[int], label: str, *, members: Sequence[int]
) -> str | None:
    """In words: the ranks that are silent, else those that have left, else those that are behind in their verbs."""

    def last(rank: int) -> tuple[int, str]:
        number, what = ((records[rank] or {}).get("verbs") or {}).get(label, (-1, "none"))
        return number, what

    def each(ranks: Sequence[int]) -> str:
        return "; ".join(f"last verb of rank {r}: {last(r)[1]} (verb {last(r)[0]})" for r in ranks if r in members)

    if silent:
        return f"{ranks_text(silent)} stopped responding: no sign of life for {PATIENCE} s; {each(silent)}"
    left = [rank for rank, record in enumerate(records) if record is not None and record["state"] == "left"]
    if left:
        return f"{ranks_text(left)} ended and took no more part; {each(left)}"
    numbers = {rank: last(rank)[0] for rank in members}
    lowest, highest = min(numbers.values()), max(numbers.values())
    if lowest == highest:
        return None
    behind = [rank for rank, number in numbers.items() if number == lowest]
    return f"all ranks are alive; {ranks_text(behind)} behind, while others are at verb {highest}; {each(behind)}"


def within(seconds: float, fn: Callable[[], T]) -> T | None:
    """fn() in a thread of its own; None where it fails or takes longer, as an operation of hung peers may never end."""
    answer: list[T] = []

    def body() -> None:
        try:
            answer.append(fn())
        except Exception as error:
            log.debug("no answer of the other ranks: %s", error)

    thread = threading.Thread(target=body, name="plsc patience", daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None
