"""Many threads on one table: sums are exact under locks, Hogwild keeps the index whole, saving goes on beside."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from plsc.ps import PythonRule, Table


def run(threads: int, work: object) -> list:
    with ThreadPoolExecutor(threads) as pool:
        return [done.result() for done in [pool.submit(work, i) for i in range(threads)]]


def exact_sums(threads: int, pushes: int, batch: int, num_keys: int, dim: int) -> None:
    """Whole gradients and a power of two as rate: float32 sums are exact in whatever order they come."""
    table = Table(dim, rule="sgd", lr=0.5, init="zeros", locked=True, stripes=16)

    def work(seed: int) -> np.ndarray:
        random = np.random.default_rng(seed)
        mine = np.zeros((num_keys, dim), np.float64)
        for _ in range(pushes):
            keys = np.minimum(random.zipf(1.3, batch) - 1, num_keys - 1).astype(np.uint64)
            grads = random.integers(-3, 4, (batch, dim)).astype(np.float32)
            table.push(keys, grads)
            np.add.at(mine, keys.astype(np.int64), grads)
            table.pull(keys)
        return mine

    total = np.sum(run(threads, work), axis=0)
    np.testing.assert_array_equal(table.pull(np.arange(num_keys, dtype=np.uint64)), -0.5 * total)


def test_sums_are_exact_under_locks() -> None:
    exact_sums(threads=4, pushes=10, batch=2000, num_keys=3000, dim=3)


@pytest.mark.slow
def test_ten_million_pushes_are_exact_under_locks() -> None:
    exact_sums(threads=4, pushes=50, batch=50_000, num_keys=100_000, dim=1)


def test_hogwild_keeps_the_index_whole() -> None:
    """Keys of a thread's own: their floats are raced by nobody, the index by all, while it grows."""
    table = Table(4, rule="sgd", lr=1.0, init="zeros", stripes=4)

    def work(me: int) -> None:
        for part in range(20):
            keys = np.arange(part * 500, part * 500 + 1000, dtype=np.uint64) * np.uint64(8) + np.uint64(me)
            table.push(keys, np.full((1000, 4), me + 1, np.float32))

    run(8, work)
    for me in range(8):
        rows = table.pull(np.arange(500, 10_000, dtype=np.uint64) * np.uint64(8) + np.uint64(me))
        np.testing.assert_array_equal(rows, np.full((9500, 4), -2.0 * (me + 1)))
    assert len(table) == 8 * 10_500


def test_sixty_four_threads_with_a_bound(tmp_path: Path) -> None:
    """Births, evictions, erasures and saves at once: sizes stay right and every row stays its key's."""
    table = Table(2, rule="sgd", init="constant", init_scale=1.0, max_rows=2000, stripes=16, locked=True)

    def work(me: int) -> None:
        random = np.random.default_rng(me)
        for _ in range(6):
            keys = random.integers(0, 6000, 500, np.uint64)
            assert (table.pull(keys) == 1.0).all()
            table.push(keys, np.zeros((500, 2), np.float32))
            if me % 8 == 0:
                table.erase(keys[:50])
                table.save(tmp_path / str(me))

    run(64, work)
    assert len(table) <= 2000
    assert len(table) == sum(len(keys) for keys, _ in table.items())
    assert len(Table.load(tmp_path / "0")) <= 2000


def test_saving_while_training(tmp_path: Path) -> None:
    """Both components of a row always move together: a save that caught a row half way would show it."""
    table = Table(2, rule="sgd", lr=1.0, init="zeros", locked=True)
    keys = np.arange(5000, dtype=np.uint64)
    table.pull(keys)

    def work(me: int) -> None:
        for turn in range(15):
            if me == 0:
                table.save(tmp_path / "t")
                rows = Table.load(tmp_path / "t").pull(keys)
                np.testing.assert_array_equal(rows[:, 0], rows[:, 1])
            else:
                table.push(keys, np.full((5000, 2), turn, np.float32))

    run(3, work)


class Slow(PythonRule):
    def __init__(self) -> None:
        self.under_way, self.go_on = threading.Event(), threading.Event()

    def state_size(self, dim: int) -> int:
        return 0

    def update(self, values: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float) -> None:
        self.under_way.set()
        self.go_on.wait(60)
        values -= lr * grads


def _push_and_save(table: Table, path: Path) -> None:
    table.rule.go_on.set()
    table.push(np.arange(3, dtype=np.uint64), np.ones((3, 2), np.float32))
    table.save(path)


def test_a_child_does_not_wait_for_threads_of_its_parent(tmp_path: Path) -> None:
    """A fork in the middle of another thread's push and save: in the child nobody would end them."""
    table = Table(2, rule=Slow(), lr=1.0, init="zeros", locked=True)
    pushing = threading.Thread(target=table.push, args=(np.arange(3, dtype=np.uint64), np.ones((3, 2), np.float32)))
    pushing.start()
    table.rule.under_way.wait(60)
    with table._saving:  # as a save does until its file stands
        child = multiprocessing.get_context("fork").Process(target=_push_and_save, args=(table, tmp_path / "t"))
        child.start()
        child.join(30)
        child.kill()
    table.rule.go_on.set()
    pushing.join()
    assert child.exitcode == 0
    np.testing.assert_array_equal(Table.load(tmp_path / "t", rule=Slow()).pull(np.arange(3, dtype=np.uint64)), -1.0)
