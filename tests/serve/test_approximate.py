"""Approximate search: recall against exact search as it says, and refusals in words."""

import numpy as np
import pytest

from plsc.serve.approximate import ApproximateIndex
from plsc.serve.index import Index, recall

pytest.importorskip("faiss")


def clustered(count: int, dim: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((50, dim))[rng.integers(0, 50, count)] + 0.7 * rng.standard_normal((count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "count", "least"),
    [("hnsw", 3000, 0.95), pytest.param("ivfpq", 10_000, 0.6, marks=pytest.mark.slow)],
)
def test_recall_is_what_it_measures(kind: str, count: int, least: float) -> None:
    rows = clustered(count, 32)
    exact = Index(rows)
    found = ApproximateIndex.build(exact, kind=kind)
    assert len(found) == count and found.measure(exact, num_queries=100) >= least
    queries = clustered(40, 32, seed=1)
    scores, at = found.search(queries, 10)
    assert recall(at, exact.search(queries, 10)[1]) >= least - 0.1
    assert (np.diff(scores, axis=1) <= 1e-6).all()


def test_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="expected one of ivfpq, hnsw"):
        ApproximateIndex.build(Index(clustered(10, 4)), kind="lsh")
    with pytest.raises(ValueError, match="expected 10,000 or more"):
        ApproximateIndex.build(Index(clustered(100, 4)), kind="ivfpq")
    with pytest.raises(ValueError, match="got 2 sub-centres"):
        ApproximateIndex.build(Index(clustered(20, 4).reshape(10, 2, 4)), kind="hnsw")
    with pytest.raises(ValueError, match="nan"):
        ApproximateIndex.build(Index(clustered(100, 4)), kind="hnsw").search(np.full((1, 4), np.nan), 1)
