"""Rows a second of the sparse table beside a bare gather, a sorted table, a dict and torch's sparse Adagrad.

    python benchmarks/table.py [--rows 5000000] [--repeats 30]

Batches of 65,536 keys, uniform and Zipf(1.05), dim 16, Adagrad. All contenders take turns within one run, so that a
noisy machine hurts them alike; medians of processor time and their ratios to the bare gather count, not single numbers.
Two threads are timed by the clock on the wall: run those on a quiet machine.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from plsc.ps import Table

BATCH, DIM, LR = 65_536, 16, 0.05
Timed = Callable[[int], object]


class SortedTable:
    """What numpy alone can do: keys sorted, found by bisection; it cannot grow."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        order = np.argsort(keys)
        self.keys, self.values = keys[order], values[order]
        self.sums = np.zeros_like(self.values)

    def pull(self, keys: np.ndarray) -> np.ndarray:
        return self.values[np.searchsorted(self.keys, keys)]

    def push(self, keys: np.ndarray, grads: np.ndarray) -> None:
        unique, inverse = np.unique(keys, return_inverse=True)
        merged = np.zeros((len(unique), DIM), np.float32)
        np.add.at(merged, inverse, grads)
        at = np.searchsorted(self.keys, unique)
        self.sums[at] += merged**2
        self.values[at] -= LR * merged / (np.sqrt(self.sums[at]) + 1e-10)


class DictTable:
    """A Python dict of numpy rows, which most first versions are."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.rows = dict(zip(keys.tolist(), values, strict=True))

    def pull(self, keys: np.ndarray) -> np.ndarray:
        return np.stack([self.rows[key] for key in keys.tolist()])


def draw(kind: str, rows: int, repeats: int, random: np.random.Generator) -> list[np.ndarray]:
    if kind == "uniform":
        return [random.integers(0, rows, BATCH) for _ in range(repeats)]
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -1.05
    cumulative = np.cumsum(weights)
    places = random.permutation(rows)  # popular ids lie anywhere in memory
    return [places[np.searchsorted(cumulative, random.random(BATCH) * cumulative[-1])] for _ in range(repeats)]


def medians(contenders: dict[str, Timed], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Million rows a second of each; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats):
        for name, work in contenders.items():
            start = clock()
            work(turn)
            times[name].append(clock() - start)
    return {name: BATCH / float(np.median(spent)) / 1e6 for name, spent in times.items()}


def together(work: Timed, repeats: int) -> float:
    """Million rows a second of two threads, each with batches of its own."""
    with ThreadPoolExecutor(2) as pool:
        start = time.perf_counter()
        halves = [pool.submit(lambda part: [work(i) for i in range(part, repeats, 2)], part) for part in range(2)]
        for half in halves:
            half.result()
        return BATCH * repeats / (time.perf_counter() - start) / 1e6


def report(title: str, rates: dict[str, float]) -> None:
    print(f"\n{title}\n{'':28}{'M rows/s':>10}{'of gather':>11}")
    for name, rate in rates.items():
        print(f"{name:28}{rate:10.2f}{rate / rates['bare gather']:11.2f}")


def torch_adagrad(rows: int, batches: list[np.ndarray], grads: torch.Tensor) -> Timed:
    """Coalescing and step of torch.optim.Adagrad on a sparse gradient; no forward, no backward."""
    weight = torch.nn.Parameter(torch.zeros(rows, DIM))
    optimizer = torch.optim.Adagrad([weight], lr=LR)

    def step(i: int) -> None:
        weight.grad = torch.sparse_coo_tensor(
            torch.from_numpy(batches[i])[None], grads, weight.shape, check_invariants=False
        )
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    ids = np.arange(args.rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    dense = random.standard_normal((args.rows, DIM), np.float32)
    grads = random.standard_normal((BATCH, DIM), np.float32)
    out = np.empty((BATCH, DIM), np.float32)
    tables = {"table (Hogwild)": Table(DIM, lr=LR), "table (locked)": Table(DIM, lr=LR, locked=True)}
    for name, table in tables.items():
        start = time.thread_time()
        for some in np.array_split(np.arange(args.rows), max(1, args.rows // BATCH)):
            table.assign(ids[some], dense[some])
        rate = args.rows / (time.thread_time() - start) / 1e6
        stats = table.stats()
        beyond = (stats["index_bytes"] + stats["arena_bytes"] - stats["payload_bytes"]) / args.rows
        print(f"{name}: filled at {rate:.2f} M rows/s, {beyond:.1f} bytes a row beyond the payload")
    bisected, mapping = SortedTable(ids, dense), DictTable(ids[: args.rows // 10], dense[: args.rows // 10])
    for kind in ("uniform", "zipf"):
        batches = draw(kind, args.rows, args.repeats, random)
        keys = [ids[batch] for batch in batches]
        few = [ids[batch % (args.rows // 10)] for batch in batches]  # a dict of all rows would fill the memory
        gather = lambda i, batches=batches: np.take(dense, batches[i], axis=0, out=out, mode="clip")  # noqa: E731
        pulls: dict[str, Timed] = {"bare gather": gather}
        pushes: dict[str, Timed] = {"bare gather": gather}
        for name, table in tables.items():
            pulls[name] = lambda i, table=table, keys=keys: table.pull(keys[i], out=out)
            pushes[name] = lambda i, table=table, keys=keys: table.push(keys[i], grads)
        pulls["numpy searchsorted"] = lambda i, keys=keys: bisected.pull(keys[i])
        pulls["dict of rows"] = lambda i, few=few: mapping.pull(few[i])
        pushes["numpy searchsorted"] = lambda i, keys=keys: bisected.push(keys[i], grads)
        pushes["torch sparse Adagrad"] = torch_adagrad(args.rows, batches, torch.from_numpy(grads))
        report(f"pull, {kind}", medians(pulls, args.repeats, time.thread_time))
        report(f"push, {kind}", medians(pushes, args.repeats, time.thread_time))
        for name, table in tables.items():
            work = {
                "pull": lambda i, table=table, keys=keys: table.pull(keys[i]),
                "push": lambda i, table=table, keys=keys: table.push(keys[i], grads),
            }
            for verb, one in work.items():
                single = medians({verb: one}, args.repeats, time.perf_counter)[verb]
                both = together(one, args.repeats)
                print(f"{name}, {verb}, {kind}: two threads {both:.2f} M rows/s, {both / single:.2f} times one")


if __name__ == "__main__":
    main()
