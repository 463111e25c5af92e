"""A table that several workers share: which pushes it has applied, synchronous rounds, who has seen which change."""

import itertools
import math
import threading
import time
import uuid
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from plsc.ps.arrays import Array, as_floats, as_keys
from plsc.ps.merging import merge
from plsc.ps.rules import PythonRule, Rule
from plsc.ps.store import Changes, WorkerMissing
from plsc.ps.table import Table

REMEMBERED_CLIENTS = 10_000  # clients long gone whose last push is still known
REMEMBERED_KEYS = 50_000_000  # changes kept for workers that have not seen them
TICK = 0.1  # how often a waiting worker looks whether it is still wanted
SILENT = 30.0  # seconds without a word after which a worker whose connection stands is not counted
RECOUNT = 1.0  # seconds between two counts of workers where none joins or leaves


@dataclass
class Client:
    """One worker process, from its start to its end: a worker that starts anew is another client."""

    id: str
    rank: int
    sequence: int = 0  # of its last write that was applied
    seen: int = 0  # the last change it knows of
    exchanges: bool = False
    pulled: int = 0  # writes before its last pull
    heard: float = math.inf  # when it last said something; infinite while it is being answered, or need not
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Round:
    workers: int
    parts: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # by rank


class Journal(Protocol):
    """Where writes are noted before they are applied; see log.py."""

    def write(self, kind: str, client: Client, sequence: int, arrays: dict[str, np.ndarray], **facts: Any) -> None: ...


class Closing(RuntimeError):
    """The host is being closed; what was asked was not done and may be asked of its successor."""


class Host:
    """A table with its workers. Any number of threads may call it; every write carries its client's sequence number.

    A write whose number is not above the client's last one was applied before and is left out: exactly once, however
    often it is sent. `journal` gets every write before it is applied, in the order in which they are.
    """

    def __init__(self, table: Table, *, name: str = "table") -> None:
        self.table = table
        self.name = name
        self.clients: dict[str, Client] = {}
        self.order = threading.RLock()  # held while a write is noted and applied, where there is a journal
        self.round = 0  # synchronous rounds applied
        self.writes = 0
        self.duplicates = 0
        self.epoch = uuid.uuid4().hex
        self._journal: Journal | None = None
        self._connected: dict[str, int] = {}
        self._counted = (0, -math.inf)  # workers, and until when that holds
        self._gathering: dict[int, _Round] = {}
        self._moved = threading.Condition()
        self._closing = False
        self._changes: deque[tuple[int, str, np.ndarray]] = deque()  # version, client, keys
        self._version = 0
        self._floor = 0  # changes up to this version are forgotten
        self._remembered = 0
        self._logging_changes = False
        self._born_before = 0  # rows that came with a save

    # ---- workers

    def join(self, client_id: str, rank: int) -> Client:
        with self._moved:
            client = self.clients.pop(client_id, None) or Client(client_id, rank, pulled=self.writes)
            client.seen = max(client.seen, self._version) if client.sequence == 0 else client.seen
            self.clients[client_id] = client  # youngest last
            self._connected[client_id] = self._connected.get(client_id, 0) + 1
            self._counted = (0, -math.inf)
            for old in itertools.islice(list(self.clients), max(0, len(self.clients) - REMEMBERED_CLIENTS)):
                if old not in self._connected:
                    del self.clients[old]
            return client

    def leave(self, client: Client) -> None:
        with self._moved:
            self._counted = (0, -math.inf)
            left = self._connected.get(client.id, 0) - 1
            if left > 0:
                self._connected[client.id] = left
            else:
                self._connected.pop(client.id, None)

    @property
    def num_workers(self) -> int:
        """Those connected, without those of whom nothing was heard for SILENT seconds: a machine may vanish."""
        now = time.monotonic()
        number, until = self._counted
        if now >= until:
            with self._moved:
                number = sum(self._is_here(self.clients[each], now) for each in list(self._connected))
                self._counted = (number, now + min(RECOUNT, SILENT))
        return number

    def _is_here(self, client: Client, now: float) -> bool:
        return client.id in self._connected and now - client.heard < SILENT

    def next_round(self, client: Client) -> int:
        with self._moved:
            number = self.round
            while number in self._gathering and client.rank in self._gathering[number].parts:
                number += 1
            return number

    def close(self) -> None:
        """Whoever waits here is sent away."""
        with self._moved:
            self._closing = True
            self._moved.notify_all()

    def keep(self, journal: Journal) -> None:
        """From now on writes are noted there."""
        self._journal = journal

    # ---- reads

    def pull(self, client: Client, keys: np.ndarray, out: np.ndarray, *, create: bool) -> None:
        client.pulled = self.writes
        self.table.pull(keys, create=create, out=out)

    def wait_round(self, round: int, *, deadline: float, wanted: Any = lambda: True) -> None:
        """`wanted()` false: nobody waits for the answer any more."""
        until = time.monotonic() + deadline
        with self._moved:
            while self.round < round:
                if self._closing:
                    raise Closing(self.name)
                left = until - time.monotonic()
                if left <= 0:
                    raise WorkerMissing(self._missing(deadline))
                if not wanted():
                    return
                self._moved.wait(min(left, TICK))

    def _missing(self, deadline: float) -> str:
        now = self._gathering.get(self.round)
        if now is None:
            who = "no worker has"
        else:
            ranks = [str(rank) for rank in range(now.workers) if rank not in now.parts]
            who = f"worker {', '.join(ranks)} {'has' if len(ranks) == 1 else 'have'}"
        return (
            f"round {self.round} of table {self.name!r}: {who} not come within {deadline:g} s; "
            "start that worker again, or give a longer deadline"
        )

    # ---- writes

    def push(
        self,
        client: Client,
        sequence: int,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> int:
        """How many gradients were refused."""
        if (shows is not None or clicks is not None) and not self.table.keeps_counters:  # before it is noted
            raise ValueError("got shows or clicks, but this table keeps no counters; make it with counters=True")
        with client.lock:
            if self._known(client, sequence):
                return 0
            if self._journal is None:
                refused = self.table.push(keys, grads, shows=shows, clicks=clicks)
                self._applied(client, sequence, keys)
                return refused
            with self.order:
                arrays = {"keys": keys, "grads": grads, "shows": shows, "clicks": clicks}
                self._note("push", client, sequence, {name: x for name, x in arrays.items() if x is not None})
                refused = self.table.push(keys, grads, shows=shows, clicks=clicks)
                self._applied(client, sequence, keys)
                return refused

    def contribute(
        self, client: Client, sequence: int, keys: np.ndarray, grads: np.ndarray, *, round: int, workers: int
    ) -> None:
        if not 0 <= client.rank < workers:
            raise ValueError(f"got worker {client.rank}, expected 0 to {workers - 1}, for the rounds have {workers}")
        with client.lock, self.order:
            if self._known(client, sequence):
                return
            self._check_round(client, round, workers)
            self._note("contribute", client, sequence, {"keys": keys, "grads": grads}, round=round, workers=workers)
            with self._moved:
                gathering = self._gathering.setdefault(round, _Round(workers))
                gathering.parts[client.rank] = (keys.copy(), grads.copy())
            self._applied(client, sequence, None)
            self._close_rounds()

    def _check_round(self, client: Client, round: int, workers: int) -> None:
        if round < self.round:
            raise ValueError(
                f"worker {client.rank} brought gradients of round {round}, but rounds up to {self.round} are closed; "
                "are two workers of one number running?"
            )
        known = self._gathering.get(round)
        if known is not None and known.workers != workers:
            raise ValueError(f"worker {client.rank} counts {workers} workers, the others {known.workers}")
        if known is not None and client.rank in known.parts:
            raise ValueError(f"worker {client.rank} came to round {round} twice; are two of that number running?")

    def _close_rounds(self) -> None:
        """Applies the rounds that are complete: sums in the order of ranks, divided by all workers of the round."""
        while self._gathering:
            # The first open round is the next one; only a host that went back to an old save has missed some.
            number = min(self._gathering)
            now = self._gathering[number]
            if len(now.parts) < now.workers:
                return
            parts = [now.parts[rank] for rank in range(now.workers)]
            keys, sums = merge(np.concatenate([k for k, _ in parts]), np.concatenate([g for _, g in parts]))
            self.table.push(keys, sums / np.float32(now.workers))
            with self._moved:
                del self._gathering[number]
                self.round = number + 1
                self._moved.notify_all()

    def exchange(
        self, client: Client, sequence: int, keys: np.ndarray, deltas: np.ndarray, *, epoch: str, since: int
    ) -> tuple[np.ndarray, np.ndarray, int, bool]:
        """Adds; answers keys and rows that others changed after version `since`, the version now, and `behind`."""
        self.add(client, sequence, keys, deltas)
        with self._moved:
            version, client.exchanges = self._version, True
            client.seen = since if epoch == self.epoch else version
            behind = epoch != self.epoch or since < self._floor
            news = [k for number, who, k in self._changes if number > since and who != client.id]
        (changed,) = merge(np.concatenate(news)) if news and not behind else (np.empty(0, np.uint64),)
        rows = self.table.pull(changed, create=False)
        return changed, rows, version, behind

    def add(self, client: Client, sequence: int, keys: np.ndarray, deltas: np.ndarray) -> None:
        """A part of an exchange; the last one tells what others have changed."""
        with self._moved:
            client.exchanges = True
            if not self._logging_changes:
                self._logging_changes = True
                if self.writes:  # by whom nobody noted
                    self._version += 1
                    self._floor = self._version
        with client.lock:
            if not self._known(client, sequence):
                with self.order:
                    self._note("add", client, sequence, {"keys": keys, "deltas": deltas})
                    self.table.add(keys, deltas)
                    self._applied(client, sequence, keys)

    def set_lr(self, client: Client, sequence: int, lr: float) -> None:
        with client.lock, self.order:
            if self._known(client, sequence):
                return
            before, self.table.lr = self.table.lr, lr  # what is no rate is refused before it is noted
            try:
                self._note("lr", client, sequence, {}, lr=lr)
            except OSError:
                self.table.lr = before
                raise
            self._applied(client, sequence, None)

    def _known(self, client: Client, sequence: int) -> bool:
        if sequence > client.sequence:
            return False
        self.duplicates += 1
        return True

    def _note(self, kind: str, client: Client, sequence: int, arrays: dict[str, np.ndarray], **facts: Any) -> None:
        if self._journal is not None:
            self._journal.write(kind, client, sequence, arrays, **facts)

    def _applied(self, client: Client, sequence: int, keys: np.ndarray | None) -> None:
        client.sequence = sequence
        with self._moved:
            self.writes += 1
            if keys is None or not self._logging_changes or not len(keys):
                return
            self._version += 1
            self._changes.append((self._version, client.id, keys.copy()))
            self._remembered += len(keys)
            now = time.monotonic()
            known = [c.seen for c in self.clients.values() if c.exchanges and self._is_here(c, now)]
            oldest = min(known, default=self._version)
            while self._changes and (self._changes[0][0] <= oldest or self._remembered > REMEMBERED_KEYS):
                version, _, forgotten = self._changes.popleft()
                self._floor, self._remembered = version, self._remembered - len(forgotten)

    # ---- what a save holds beside the table

    def state(self) -> dict[str, Any]:
        """To be called with `order` held."""
        clients = {c.id: [c.rank, c.sequence] for c in self.clients.values() if c.sequence}
        return {"round": self.round, "clients": clients}

    def open_rounds(self) -> list[tuple[Client, int, int, np.ndarray, np.ndarray]]:
        """Contributions to rounds that are not complete: (client, round, workers, keys, grads)."""
        return [
            (Client("", rank), number, each.workers, *each.parts[rank])
            for number, each in sorted(self._gathering.items())
            for rank in sorted(each.parts)
        ]

    def begin(self) -> None:
        """What was restored and replayed is no work of this process: it counts from here."""
        self._born_before, self.writes = self.table.stats()["born"], 0

    def restore(self, state: dict[str, Any]) -> None:
        self.round = state["round"]
        self.clients = {id: Client(id, rank, sequence) for id, (rank, sequence) in state["clients"].items()}

    def replay(self, record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Applies a noted write again."""
        client = self.clients.setdefault(record["client"], Client(record["client"], record["rank"]))
        kind, sequence = record["kind"], record["sequence"]
        if kind == "open":  # a contribution that a save found in an open round; its number is in the save
            self._gathering.setdefault(record["round"], _Round(record["workers"])).parts[record["rank"]] = (
                arrays["keys"],
                arrays["grads"],
            )
        elif kind == "push":
            self.push(client, sequence, arrays["keys"], arrays["grads"], **_some(arrays, "shows", "clicks"))
        elif kind == "contribute":
            self.contribute(
                client, sequence, arrays["keys"], arrays["grads"], round=record["round"], workers=record["workers"]
            )
        elif kind == "add":
            self.add(client, sequence, arrays["keys"], arrays["deltas"])
        elif kind == "lr":
            self.set_lr(client, sequence, record["lr"])
        else:
            raise ValueError(f"the log has a record of kind {kind!r}, which this plsc does not know")

    def stats(self) -> dict[str, int]:
        stats = self.table.stats()
        return {
            **stats,
            "born": stats["born"] - self._born_before,
            "round": self.round,
            "writes": self.writes,
            "duplicates": self.duplicates,
            "workers": self.num_workers,
        }


def _some(arrays: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: arrays[name] for name in names if name in arrays}


class Seat:
    """One worker's place at a Host in this process: the table itself to it, with what modes ask beyond."""

    def __init__(self, host: Host, *, rank: int = 0) -> None:
        self._host = host
        self._client = host.join(uuid.uuid4().hex, rank)
        self._sequence = itertools.count(1)
        self._one_write = threading.Lock()  # numbers arrive in order
        self._since = (host.epoch, self._client.seen)
        self._leave = weakref.finalize(self, host.leave, self._client)

    @property
    def dim(self) -> int:
        return self._host.table.dim

    @property
    def rule(self) -> Rule | PythonRule:
        return self._host.table.rule

    @property
    def lr(self) -> float:
        return self._host.table.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        with self._one_write:
            self._host.set_lr(self._client, next(self._sequence), lr)

    @property
    def keeps_counters(self) -> bool:
        return self._host.table.keeps_counters

    @property
    def last_save(self) -> str | None:
        return self._host.table.last_save

    @property
    def num_workers(self) -> int:
        return self._host.num_workers

    @property
    def next_round(self) -> int:
        return self._host.next_round(self._client)

    def birth(self) -> dict[str, Any]:
        return self._host.table.birth()

    @property
    def keeps_rows(self) -> bool:
        return self._host.table.keeps_rows

    def pull(self, keys: Array, *, create: bool = True, out: Array | None = None) -> Array:
        return self._host.table.pull(keys, create=create, out=out)

    def push(self, keys: Array, grads: Array, *, shows: Array | None = None, clicks: Array | None = None) -> int:
        array = as_keys(keys)
        floats = as_floats(grads, (len(array), self.dim), "grads")
        counts = [None if x is None else as_floats(x, array.shape, "shows or clicks") for x in (shows, clicks)]
        with self._one_write:
            number = next(self._sequence)
            return self._host.push(self._client, number, array, floats, shows=counts[0], clicks=counts[1])

    def contribute(self, keys: np.ndarray, grads: np.ndarray, *, round: int, workers: int) -> None:
        with self._one_write:
            number = next(self._sequence)
            self._host.contribute(self._client, number, keys, grads, round=round, workers=workers)

    def wait_round(self, round: int, *, deadline: float) -> None:
        self._host.wait_round(round, deadline=deadline)

    def add(self, keys: np.ndarray, deltas: np.ndarray) -> np.ndarray:
        with self._one_write:
            self._host.add(self._client, next(self._sequence), keys, deltas)
        return deltas

    def exchange(self, keys: np.ndarray, deltas: np.ndarray) -> Changes:
        with self._one_write:
            epoch, since = self._since
            number = next(self._sequence)
            changed, rows, version, behind = self._host.exchange(
                self._client, number, keys, deltas, epoch=epoch, since=since
            )
            self._since = (self._host.epoch, version)
        return Changes(changed, rows, deltas, behind=behind)

    def close(self) -> None:
        self._leave()
