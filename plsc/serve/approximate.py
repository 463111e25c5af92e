"""Approximate search through faiss: less work a query, a recall that is measured against exact search."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from plsc.serve.index import Index, Rows, Scores, check_queries, recall

KINDS = ("ivfpq", "hnsw")
ROWS = 65_536  # that are added at once
TRAIN_ROWS = 262_144  # that the cells and codes are learnt from


class ApproximateIndex:
    """Nearest rows by cells of product-quantised codes ("ivfpq": small) or by a graph ("hnsw": fast, more memory)."""

    def __init__(self, index: Any, dim: int) -> None:
        self._index, self.dim = index, dim

    @classmethod
    def build(cls, exact: Index, *, kind: str, seed: int = 0, probes: int = 32) -> ApproximateIndex:
        """Learns from and holds the rows of an exact index [N, D]. probes: cells or neighbours a query looks at."""
        if kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(KINDS)}")
        faiss = _faiss()
        count, dim = len(exact), exact.dim
        if exact.centers > 1:
            raise ValueError(f"got {exact.centers} sub-centres a class, expected one for approximate search; use exact")
        if kind == "hnsw":
            index = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction, index.hnsw.efSearch = 100, max(2 * probes, 64)
        else:
            cells = max(1, min(int(4 * count**0.5), count // 39))  # faiss wants 39 rows a cell to learn from
            if count < 10_000:
                raise ValueError(f"ivfpq: got {count} rows, expected 10,000 or more to learn codes from; use exact")
            parts = next(n for n in (dim // 4, dim // 2, 1) if n and dim % n == 0)
            index = faiss.IndexIVFPQ(faiss.IndexFlatIP(dim), dim, cells, parts, 8, faiss.METRIC_INNER_PRODUCT)
            index.nprobe = min(probes, cells)
            chosen = np.random.default_rng(seed).permutation(count)[: min(TRAIN_ROWS, count)]
            index.train(np.concatenate([exact.rows(int(i), int(i) + 1) for i in np.sort(chosen)]))
        for start in range(0, count, ROWS):
            index.add(exact.rows(start, min(start + ROWS, count)))
        return cls(index, dim)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: ArrayLike, k: int) -> tuple[Scores, Rows]:
        """Scores [B, k] in falling order and rows [B, k]; -1 where it found fewer. "ivfpq": scores of its codes."""
        scores, rows = self._index.search(check_queries(queries, self.dim), k)
        return np.asarray(scores, np.float32), np.asarray(rows, np.int64)

    def measure(self, exact: Index, *, k: int = 10, num_queries: int = 200, noise: float = 0.5, seed: int = 0) -> float:
        """Recall@k against exact search, for rows of the index moved by noise of that length."""
        rng = np.random.default_rng(seed)
        chosen = rng.integers(0, len(exact), num_queries)
        queries = np.concatenate([exact.rows(int(i), int(i) + 1) for i in chosen])
        shift = rng.standard_normal(queries.shape).astype(np.float32)
        queries += noise * shift / np.linalg.norm(shift, axis=1, keepdims=True)
        k = min(k, len(exact))
        return recall(self.search(queries, k)[1], exact.search(queries, k)[1])


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ImportError("approximate search needs faiss; remedy: pip install 'plsc-torch[ann]'") from error
