"""Pushes whose keys repeat, what they move rows by, and workers that are threads: for the tests of modes."""

import threading
from collections.abc import Callable

import numpy as np

from plsc.ps import Table

DIM = 3
KEYS = np.arange(40, dtype=np.uint64) * np.uint64(2**58 + 77)


def table(rule: object = "sgd", **options: object) -> Table:
    return Table(DIM, rule=rule, lr=0.5, locked=True, init_scale=0.3, **options)


def batches(count: int, seed: int, size: int = 12) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pushes whose keys come several times, in one push and over many."""
    random = np.random.default_rng(seed)
    return [(random.choice(KEYS, size), random.standard_normal((size, DIM)).astype(np.float32)) for _ in range(count)]


def moved(pushes: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """What SGD at rate 0.5 has added to the rows of KEYS in all, in float64."""
    sums = np.zeros((len(KEYS), DIM))
    for keys, grads in pushes:
        np.add.at(sums, np.searchsorted(KEYS, keys), grads.astype(np.float64))
    return -0.5 * sums


def together(work: Callable[[int], None], count: int) -> None:
    """work(0), ..., work(count - 1), a thread each; the first error is raised here."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
