"""Search for the rows nearest to a query: exact, block by block over mapped files, by one process or by all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from plsc.comm import Communicator, Shard
from plsc.data.embeddings import open_embeddings
from plsc.ops import block_topk, split_topk

BLOCK_BYTES = 2 * 2**20  # of float32 rows multiplied at once: more would not stay in the cache

Scores = NDArray[np.float32]
Rows = NDArray[np.int64]


class Searcher(Protocol):
    """What the service needs of an index, exact or approximate."""

    dim: int

    def __len__(self) -> int: ...

    def search(self, queries: ArrayLike, k: int) -> tuple[Scores, Rows]:
        """Scores [B, k] in falling order and row numbers [B, k]."""
        ...


class Index:
    """Exact nearest rows by inner product; cosines, where rows and queries have unit length.

    rows: [N, D], or [N, K, D] of which the best of a row's K counts; float32, float16, or int8 with a factor a row in
    `scales` [N] or [N, K]. A memory map is read as it is searched, so it may be larger than memory.
    comm: the rows are searched by all its ranks, each its Shard; then every rank calls search with the same B and k.
    """

    def __init__(
        self,
        rows: NDArray[np.generic],
        *,
        scales: NDArray[np.float32] | None = None,
        comm: Communicator | None = None,
        block: int | None = None,
    ) -> None:
        if rows.ndim not in (2, 3) or rows.dtype not in (np.float32, np.float16, np.int8):
            raise ValueError(
                f"rows: got {rows.dtype} of shape {rows.shape}, expected float32, float16 or int8 [N, D] or [N, K, D]"
            )
        if (scales is None) != (rows.dtype != np.int8) or (scales is not None and scales.shape != rows.shape[:-1]):
            got = "none" if scales is None else f"shape {scales.shape}"
            raise ValueError(f"scales: got {got}, expected {list(rows.shape[:-1])} with int8 rows and none with others")
        self.dim = rows.shape[-1]
        self.centers = rows.shape[1] if rows.ndim == 3 else 1  # of a row
        self._rows, self._scales, self._comm = rows, scales, comm
        self._block = block or max(1, BLOCK_BYTES // (4 * int(np.prod(rows.shape[1:]))))
        self._shard = None if comm is None else Shard.of(len(rows), comm)

    @classmethod
    def open(cls, path: str | Path, *, comm: Communicator | None = None) -> Index:
        """The embeddings or centres of a file, by memory map."""
        file = open_embeddings(path)
        if not file.normalized:
            raise ValueError(f"{path}: embeddings are not of unit length; write them with normalize=True")
        return cls(file.embeddings, scales=file.scales, comm=comm)

    def __len__(self) -> int:
        return len(self._rows)

    def search(self, queries: ArrayLike, k: int) -> tuple[Scores, Rows]:
        """Scores [B, k] in falling order and row numbers [B, k]; among equals the lower row first. k <= N."""
        given = check_queries(queries, self.dim)
        if not 1 <= k <= len(self):
            raise ValueError(f"k: got {k}, expected 1 to {len(self)}, the rows there are")
        x = torch.from_numpy(given)
        if self._comm is None or self._shard is None:
            scores, found = block_topk(x, self._blocks(0, len(self)), k)
        else:
            mine = self._blocks(self._shard.start, self._shard.stop)
            scores, found = split_topk(x, mine, k, comm=self._comm, shard=self._shard)
        return scores.numpy(), found.numpy()

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Some rows as float32 [n, D] or [n, K, D]."""
        return self._as_float(start, stop).numpy()

    def _blocks(self, start: int, stop: int) -> Iterator[Tensor]:
        for first in range(start, stop, self._block):
            yield self._as_float(first, min(first + self._block, stop))

    def _as_float(self, start: int, stop: int) -> Tensor:
        block = torch.from_numpy(self._rows[start:stop])
        if block.dtype == torch.float32:
            return block
        floats = block.float()
        return floats if self._scales is None else floats.mul_(torch.from_numpy(self._scales[start:stop]).unsqueeze(-1))


class GrowingIndex:
    """Rows [N, D] that can be added and taken away, for exact search; safe to use from several threads.

    The last row takes the place of one that is taken away: whoever names the rows does the same.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._rows = np.empty((16, dim), np.float32)
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def add(self, rows: NDArray[np.float32]) -> None:
        with self._lock:
            needed = self._size + len(rows)
            if needed > len(self._rows):  # a search under way keeps the old array
                grown = np.empty((max(needed, 2 * len(self._rows)), self.dim), np.float32)
                grown[: self._size] = self._rows[: self._size]
                self._rows = grown
            self._rows[self._size : needed] = rows
            self._size = needed

    def remove(self, row: int) -> None:
        with self._lock:
            self._size -= 1
            self._rows[row] = self._rows[self._size]

    def row(self, row: int) -> NDArray[np.float32]:
        return self._rows[row].copy()

    def search(self, queries: ArrayLike, k: int) -> tuple[Scores, Rows]:
        """As Index.search; fewer than k columns where there are fewer rows."""
        with self._lock:
            if self._size == 0:
                given = check_queries(queries, self.dim)
                return np.empty((len(given), 0), np.float32), np.empty((len(given), 0), np.int64)
            return Index(self._rows[: self._size]).search(queries, min(k, self._size))


def quantize(rows: NDArray[np.float32], storage: str) -> tuple[NDArray[np.generic], NDArray[np.float32] | None]:
    """Unit rows [..., D] as "fp32", "fp16" or "int8"; with int8 the factors [...] that give unit length again."""
    if storage == "fp32":
        return rows.astype(np.float32, copy=False), None
    if storage == "fp16":
        return rows.astype(np.float16), None
    if storage != "int8":
        raise ValueError(f"storage: got {storage!r}, expected fp32, fp16 or int8")
    peak = np.abs(rows).max(axis=-1, keepdims=True).clip(1e-30)
    codes = np.rint(rows * (127 / peak)).astype(np.int8)
    lengths = np.linalg.norm(codes.astype(np.float32), axis=-1).clip(1e-30)
    return codes, (1 / lengths).astype(np.float32)


def recall(found: Rows, wanted: Rows) -> float:
    """The share of the wanted rows [B, k] that are among those found [B, k]."""
    hits = [len(np.intersect1d(mine, truth)) for mine, truth in zip(found, wanted, strict=True)]
    return float(sum(hits) / max(wanted.size, 1))


def check_queries(queries: ArrayLike, dim: int) -> NDArray[np.float32]:
    """Queries as float32 [B, D]; ValueError for another dimension or numbers that are not finite."""
    given = np.ascontiguousarray(queries, dtype=np.float32)
    if given.ndim != 2 or given.shape[1] != dim or len(given) == 0:
        raise ValueError(f"embeddings: got shape {list(given.shape)}, expected [at least 1, {dim}]")
    if not np.isfinite(given).all():
        raise ValueError("embeddings: got nan or infinite numbers, expected finite ones")
    return given
