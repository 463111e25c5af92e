"""Exact search: against the whole product in float64, in every storage, from a file, over ranks; the growing index."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plsc.comm import Communicator, run_ranks
from plsc.serve.index import GrowingIndex, Index, quantize, recall
from plsc.train.export import export_centres

DIGEST = "0" * 64


def unit(*shape: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal(shape)
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def twin(queries: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores = queries.astype(np.float64) @ rows.astype(np.float64).T
    at = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, at, 1), at


@pytest.mark.parametrize("block", [None, 1, 37, 5000])
def test_exact(block: int | None) -> None:
    rows, queries = unit(3000, 32), unit(9, 32, seed=1)
    scores, found = Index(rows, block=block).search(queries, 10)
    wanted, at = twin(queries, rows, 10)
    np.testing.assert_array_equal(found, at)
    np.testing.assert_allclose(scores, wanted, atol=1e-6)


def test_the_best_of_several_centres_counts() -> None:
    rows, queries = unit(400, 3, 16), unit(5, 16, seed=1)
    scores, found = Index(rows, block=7).search(queries, 4)
    best = np.einsum("bd,ckd->bck", queries.astype(np.float64), rows).max(2)
    at = np.argsort(-best, axis=1)[:, :4]
    np.testing.assert_array_equal(found, at)
    np.testing.assert_allclose(scores, np.take_along_axis(best, at, 1), atol=1e-6)


@pytest.mark.parametrize(("storage", "share", "least"), [("fp16", 2, 0.99), ("int8", 4, 0.97)])
def test_smaller_storage_finds_nearly_the_same(storage: str, share: int, least: float) -> None:
    rows, queries = unit(20_000, 512), unit(30, 512, seed=1)
    codes, scales = quantize(rows, storage)
    assert codes.nbytes == rows.nbytes // share and (scales is None) == (storage == "fp16")
    scores, found = Index(codes, scales=scales).search(queries, 10)
    wanted, at = twin(queries, rows, 10)
    assert recall(found, at) >= least
    np.testing.assert_allclose(scores[:, 0], wanted[:, 0], atol=3e-3)
    lengths = np.linalg.norm(codes.astype(np.float32) * (1 if scales is None else scales[:, None]), axis=1)
    np.testing.assert_allclose(lengths, 1, atol=2e-4)


def test_from_a_file_by_memory_map(tmp_path: Path) -> None:
    rows, queries = unit(500, 8), unit(3, 8, seed=1)
    path = export_centres(tmp_path / "c", rows, digest=DIGEST)
    index = Index.open(path)
    assert isinstance(index._rows, np.memmap) and (len(index), index.dim) == (500, 8)
    np.testing.assert_array_equal(index.search(queries, 5)[1], twin(queries, rows, 5)[1])
    np.testing.assert_allclose(index.rows(3, 5), rows[3:5], rtol=1e-6)


LARGE = """
import resource, sys
import numpy as np
from plsc.serve.index import Index

rows = np.memmap(sys.argv[1], np.float32, "r+", shape=(1_000_000, 256))  # of zeros: the file takes no disk
rows[777_777] = 1 / 16
rows.flush()
queries = np.full((2, 256), 1 / 16, np.float32)
Index(rows[:5000]).search(queries, 3)  # what a first search allocates
(line,) = [line for line in open("/proc/self/status") if line.startswith("VmData")]
limit = int(line.split()[1]) * 1024 + 256 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    np.array(rows)
except MemoryError:
    pass
else:
    sys.exit("the limit does not hold")
scores, found = Index(np.memmap(sys.argv[1], np.float32, "r", shape=rows.shape)).search(queries, 3)
assert found[:, 0].tolist() == [777_777] * 2 and np.allclose(scores, [[1, 0, 0]] * 2), (scores, found)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_rows_larger_than_the_memory_there_may_be(tmp_path: Path) -> None:
    """A gigabyte of rows, searched by a process that may allocate a quarter of that."""
    with (tmp_path / "rows").open("wb") as file:
        file.truncate(1_000_000 * 256 * 4)
    done = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path / "rows")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_over_ranks_each_for_its_own_queries(tmp_path: Path, ranks: int) -> None:
    rows, queries = unit(50, 8), unit(ranks * 2, 8, seed=1)
    path = export_centres(tmp_path / "c", rows, digest=DIGEST)

    def body(comm: Communicator) -> tuple[np.ndarray, np.ndarray]:
        return Index.open(path, comm=comm).search(queries[2 * comm.rank : 2 * comm.rank + 2], 6)

    found = run_ranks(ranks, body)
    np.testing.assert_array_equal(np.concatenate([at for _, at in found]), twin(queries, rows, 6)[1])


def test_growing_index_is_that_of_the_rows_there_are() -> None:
    """Random additions and removals, beside a list that does the same."""
    rng, index, kept = np.random.default_rng(0), GrowingIndex(8), []
    queries = unit(2, 8, seed=99)
    assert index.search(queries, 3)[1].shape == (2, 0)
    for step in range(120):
        if kept and rng.random() < 0.4:
            row = int(rng.integers(len(kept)))
            last = kept.pop()
            if row < len(kept):
                kept[row] = last
            index.remove(row)
        else:
            new = unit(int(rng.integers(1, 4)), 8, seed=step)
            kept += list(new)
            index.add(new)
        assert len(index) == len(kept)
        if kept:
            k = min(3, len(kept))
            np.testing.assert_array_equal(index.search(queries, 3)[1], twin(queries, np.array(kept), k)[1])


@pytest.mark.parametrize(
    ("queries", "k", "words"),
    [
        (np.ones((1, 5)), 1, "expected \\[at least 1, 4\\]"),
        (np.ones(4), 1, "got shape \\[4\\]"),
        (np.full((1, 4), np.nan), 1, "nan or infinite"),
        (np.ones((1, 4)), 0, "k: got 0"),
        (np.ones((1, 4)), 7, "expected 1 to 6"),
    ],
)
def test_queries_that_are_refused(queries: np.ndarray, k: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Index(unit(6, 4)).search(queries, k)


def test_rows_that_are_refused() -> None:
    with pytest.raises(ValueError, match="got float64"):
        Index(np.ones((2, 2)))
    with pytest.raises(ValueError, match="scales: got none"):
        Index(np.ones((2, 2), np.int8))
    with pytest.raises(ValueError, match="expected fp32, fp16 or int8"):
        quantize(unit(2, 2), "int4")
