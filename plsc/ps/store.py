"""The face that tables, remote tables and modes share; and where a key is among servers."""

from typing import Any, Protocol

import numpy as np

from plsc.ps.arrays import Array
from plsc.ps.rules import PythonRule, Rule

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Store(Protocol):
    """Rows under keys: what a Table is in this process, and what everything that stands in its place can do.

    pull answers rows [K, dim] float32 of keys [K]; push gives every key its gradient and returns how many were refused.
    Both as Table's methods of these names.
    """

    @property
    def dim(self) -> int: ...

    @property
    def rule(self) -> Rule | PythonRule: ...

    @property
    def keeps_counters(self) -> bool: ...

    @property
    def keeps_rows(self) -> bool: ...

    @property
    def last_save(self) -> str | None: ...

    lr: float

    def pull(self, keys: Array, *, create: bool = True, out: Array | None = None) -> Array: ...

    def push(self, keys: Array, grads: Array, *, shows: Array | None = None, clicks: Array | None = None) -> int: ...


class SharedStore(Store, Protocol):
    """A store that several workers share and that knows them: a seat at a Host, or a table on servers."""

    @property
    def num_workers(self) -> int:
        """Workers that hold a connection now."""
        ...

    @property
    def next_round(self) -> int:
        """The first synchronous round that this worker has no part in yet."""
        ...

    def birth(self) -> dict[str, Any]:
        """How rows are born, as Table.birth."""
        ...

    def contribute(self, keys: np.ndarray, grads: np.ndarray, *, round: int, workers: int) -> None:
        """This worker's gradients of a round; they are applied as a mean once all workers have come."""
        ...

    def wait_round(self, round: int, *, deadline: float) -> None:
        """Returns once that many rounds are applied; WorkerMissing names who has not come by the deadline (seconds)."""
        ...

    def add(self, keys: np.ndarray, deltas: np.ndarray) -> np.ndarray:
        """Adds deltas to values; answers them as they arrived: rounded where the wire rounds."""
        ...

    def exchange(self, keys: np.ndarray, deltas: np.ndarray) -> "Changes":
        """Adds deltas to values; answers the rows that others have changed since this worker's last exchange."""
        ...


class Changes:
    """Rows that other workers changed; `behind`: more than the server remembers, so every row held is to be pulled."""

    def __init__(self, keys: np.ndarray, rows: np.ndarray, deltas: np.ndarray, *, behind: bool) -> None:
        self.keys = keys  # uint64 [K]
        self.rows = rows  # float32 [K, dim]
        self.deltas = deltas  # what was added, as it arrived: rounded where the wire rounds
        self.behind = behind


class ServerLost(ConnectionError):
    """A server could not be reached for as long as the store's patience lasts.

    A write that raises it may have been applied or not; it is not sent again.
    """


class WorkerMissing(TimeoutError):
    """A synchronous round that some worker did not come to in time."""


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words whose output bits each depend on every input bit (splitmix64's finaliser)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def place(keys: np.ndarray, servers: int) -> np.ndarray:
    """Which server each key lives on, int64 [K]: by another hash than a table's stripes, which would be thinned."""
    return (mix(keys ^ GOLDEN) % np.uint64(servers)).astype(np.int64)
