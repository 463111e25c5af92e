"""Rows a second of the sparse table beside a bare gather, other tables in Python, FBGEMM and torch's sparse Adagrad.

    python benchmarks/table.py [--rows 5000000] [--ids 10000000] [--repeats 30] [--disk FOLDER]

Batches of 65,536 keys, uniform over the rows and Zipf(1.05) over the ids, dim 16, Adagrad; ids without a row get one as
they come. All contenders take turns within one run, so that a noisy machine hurts them alike; medians of processor
time and their ratios to the bare gather count, not single numbers. Two threads are timed by the clock on the wall, one
and two in turn: run those on a quiet machine. With --disk also saving and loading beside plain writing and reading of
as many bytes in that folder. numba and fbgemm-gpu-cpu (1.8 beside torch 2.13) take part where they are installed.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.ps import Table

BATCH, DIM, LR = 65_536, 16, 0.05


class Prepared:
    """Work whose first part is not timed."""

    def __init__(self, before: Callable[[int], Any], work: Callable[[Any], object]) -> None:
        self.before, self.work = before, work


Timed = Callable[[int], object] | Prepared


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


class NumbaTable:
    """The table's design in numba: open addressing, linear probing, 16-byte slots, rows apart; no locks, no growth."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.slot_keys = np.zeros(1 << int(len(keys) * 1.5).bit_length(), np.uint64)
        self.slot_rows = np.zeros(len(self.slot_keys), np.int64)
        self.rows = np.concatenate([values, np.zeros_like(values)], axis=1)  # value and Adagrad's sums
        self.fill, self.read, self.step = numba_loops()
        self.fill(self.slot_keys, self.slot_rows, keys)

    def pull(self, keys: np.ndarray, out: np.ndarray) -> None:
        self.read(self.slot_keys, self.slot_rows, self.rows, keys, out)

    def push(self, keys: np.ndarray, grads: np.ndarray) -> None:
        self.step(self.slot_keys, self.slot_rows, self.rows, keys, grads)


def numba_loops() -> tuple[Any, Any, Any]:
    from numba import njit

    @njit(nogil=True, inline="always")
    def home(key: np.uint64, mask: np.uint64) -> np.uint64:
        x = key ^ (key >> np.uint64(30))
        x *= np.uint64(0xBF58476D1CE4E5B9)
        return (x ^ (x >> np.uint64(27))) & mask

    @njit(nogil=True)
    def fill(slot_keys, slot_rows, keys) -> None:  # type: ignore[no-untyped-def]
        mask = np.uint64(len(slot_keys) - 1)
        for i in range(len(keys)):
            at = home(keys[i], mask)
            while slot_rows[at] != 0:
                at = (at + np.uint64(1)) & mask
            slot_keys[at], slot_rows[at] = keys[i], i + 1

    @njit(nogil=True, inline="always")
    def find(slot_keys, slot_rows, key):  # type: ignore[no-untyped-def]
        mask = np.uint64(len(slot_keys) - 1)
        at = home(key, mask)
        while slot_rows[at] != 0:
            if slot_keys[at] == key:
                return slot_rows[at] - 1
            at = (at + np.uint64(1)) & mask
        return -1

    @njit(nogil=True)
    def read(slot_keys, slot_rows, rows, keys, out) -> None:  # type: ignore[no-untyped-def]
        for i in range(len(keys)):
            row = find(slot_keys, slot_rows, keys[i])
            for d in range(DIM):
                out[i, d] = rows[row, d] if row >= 0 else 0.0

    @njit(nogil=True, error_model="numpy")
    def step(slot_keys, slot_rows, rows, keys, grads) -> None:  # type: ignore[no-untyped-def]
        for i in range(len(keys)):
            row = find(slot_keys, slot_rows, keys[i])
            if row >= 0:
                for d in range(DIM):
                    g = grads[i, d]
                    rows[row, DIM + d] += g * g
                    rows[row, d] -= np.float32(LR) * g / (np.sqrt(rows[row, DIM + d]) + np.float32(1e-10))

    return fill, read, step


class FbgemmTable:
    """FBGEMM's batched embedding on the CPU with exact Adagrad: rows by number, no hashing, merges repeated ids."""

    def __init__(self, values: np.ndarray) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.op = SplitTableBatchedEmbeddingBagsCodegen(
            [(len(values), DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=LR,
            eps=1e-10,
            pooling_mode=PoolingMode.SUM,
            device=torch.device("cpu"),
        )
        self.op.split_embedding_weights()[0].copy_(torch.from_numpy(values))
        self.offsets = torch.arange(BATCH + 1)

    def pull(self, ids: np.ndarray) -> None:
        with torch.no_grad():
            self.op(torch.from_numpy(ids), self.offsets)

    def forward(self, ids: np.ndarray) -> torch.Tensor:
        return self.op(torch.from_numpy(ids), self.offsets)


def draw(kind: str, rows: int, ids: int, repeats: int, random: np.random.Generator) -> list[np.ndarray]:
    """Batches of ids: uniform over the first `rows`, or Zipf(1.05) over all."""
    if kind == "uniform":
        return [random.integers(0, rows, BATCH) for _ in range(repeats)]
    cumulative = np.cumsum(np.arange(1, ids + 1, dtype=np.float64) ** -1.05)
    # Popular ids lie anywhere among the rows, the least popular ones have none.
    places = np.concatenate([random.permutation(rows), np.arange(rows, ids)])
    return [places[np.searchsorted(cumulative, random.random(BATCH) * cumulative[-1])] for _ in range(repeats)]


def medians(contenders: dict[str, Timed], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Million rows a second of each; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats):
        for name, work in contenders.items():
            ready = work.before(turn) if isinstance(work, Prepared) else None
            start = clock()
            if isinstance(work, Prepared):
                work.work(ready)
            else:
                work(turn)
            times[name].append(clock() - start)
    return {name: BATCH / float(np.median(spent)) / 1e6 for name, spent in times.items()}


def one_and_two_threads(work: Callable[[int, np.ndarray], object], repeats: int) -> tuple[float, float]:
    """Million rows a second of one thread and of two, each with batches and output of its own, by the clock."""
    outs = [np.empty((BATCH, DIM), np.float32) for _ in range(2)]
    rates: dict[int, list[float]] = {1: [], 2: []}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            for threads in (1, 2):
                barrier = threading.Barrier(threads)

                def part(me: int, threads: int = threads, barrier: threading.Barrier = barrier) -> float:
                    barrier.wait()
                    start = time.perf_counter()
                    for i in range(me, repeats, threads):
                        work(i, outs[me])
                    return time.perf_counter() - start

                spent = max(done.result() for done in [pool.submit(part, me) for me in range(threads)])
                rates[threads].append(BATCH * repeats / spent / 1e6)
    return float(np.median(rates[1])), float(np.median(rates[2]))


def on_disk(table: Table, folder: Path) -> None:
    """Saving and loading beside writing (and syncing) and reading as many bytes."""
    path, bare = folder / "table", folder / "bare"
    rates: dict[str, list[float]] = {"save": [], "write": [], "load": [], "read": []}
    for _ in range(3):
        start = time.perf_counter()
        table.save(path)
        rates["save"].append(time.perf_counter() - start)
        size = path.stat().st_size
        block = os.urandom(1 << 20)
        start = time.perf_counter()
        with bare.open("wb") as file:
            for _ in range(size >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        rates["write"].append(time.perf_counter() - start)
        start = time.perf_counter()
        Table.load(path)
        rates["load"].append(time.perf_counter() - start)
        start = time.perf_counter()
        with bare.open("rb", buffering=0) as file:
            while file.readinto(bytearray(1 << 20)):
                pass
        rates["read"].append(time.perf_counter() - start)
    speeds = {name: size / float(np.median(spent)) / 1e6 for name, spent in rates.items()}
    print(
        f"\nsave {speeds['save']:.0f} MB/s, {speeds['save'] / speeds['write']:.2f} of a bare write; load "
        f"{speeds['load']:.0f} MB/s ({len(table) / float(np.median(rates['load'])) / 1e6:.2f} M rows/s), "
        f"{speeds['load'] / speeds['read']:.2f} of a bare read (both from the system's cache); {size / 1e6:.0f} MB"
    )
    path.unlink()
    bare.unlink()


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


def fbgemm_push(table: FbgemmTable, batches: list[np.ndarray], grads: torch.Tensor) -> Timed:
    """Backward and update alone: the forward pass before it is not timed."""
    return Prepared(lambda i: table.forward(batches[i]), lambda out: out.backward(grads))


def fill(tables: dict[str, Table], ids: np.ndarray, dense: np.ndarray) -> None:
    for name, table in tables.items():
        spent = []
        for some in np.array_split(np.arange(len(dense)), max(1, len(dense) // BATCH)):
            start = time.thread_time()
            table.assign(ids[some], dense[some])
            spent.append(time.thread_time() - start)
        stats = table.stats()
        beyond = (stats["index_bytes"] + stats["arena_bytes"] - stats["payload_bytes"]) / len(dense)
        print(
            f"{name}: filled at {len(dense) / sum(spent) / 1e6:.2f} M rows/s, a batch {1e3 * np.median(spent):.1f} ms, "
            f"at worst {1e3 * max(spent):.1f} ms; {beyond:.1f} bytes a row beyond the payload"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--disk", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    ids = np.arange(args.ids, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    dense = random.standard_normal((args.rows, DIM), np.float32)
    grads = random.standard_normal((BATCH, DIM), np.float32)
    out = np.empty((BATCH, DIM), np.float32)
    tables = {"table (Hogwild)": Table(DIM, lr=LR), "table (locked)": Table(DIM, lr=LR, locked=True)}
    fill(tables, ids[: args.rows], dense)
    tenth = args.rows // 10  # a dict of all rows would fill the memory
    bisected, mapping = SortedTable(ids[: args.rows], dense), DictTable(ids[:tenth], dense[:tenth])
    compiled = NumbaTable(ids[: args.rows], dense) if find_spec("numba") else None
    fbgemm = FbgemmTable(dense) if find_spec("fbgemm_gpu") else None
    for kind in ("uniform", "zipf"):
        batches = draw(kind, args.rows, args.ids, args.repeats, random)
        keys = [ids[batch] for batch in batches]
        dense_ids = [batch % args.rows for batch in batches]  # for what has no keys
        few = [ids[batch % tenth] for batch in batches]
        gather = lambda i, at=dense_ids: np.take(dense, at[i], axis=0, out=out, mode="clip")  # noqa: E731
        pulls: dict[str, Timed] = {"bare gather": gather}
        pushes: dict[str, Timed] = {"bare gather": gather}
        for name, table in tables.items():
            pulls[name] = lambda i, table=table, keys=keys: table.pull(keys[i], out=out)
            pushes[name] = lambda i, table=table, keys=keys: table.push(keys[i], grads)
        if compiled is not None:
            pulls["numba table"] = lambda i, keys=keys: compiled.pull(keys[i], out)
            pushes["numba table"] = lambda i, keys=keys: compiled.push(keys[i], grads)
        if fbgemm is not None:
            pulls["FBGEMM, ids are row numbers"] = lambda i, at=dense_ids: fbgemm.pull(at[i])
            pushes["FBGEMM, backward and update"] = fbgemm_push(fbgemm, dense_ids, torch.from_numpy(grads))
        known = [ids[at] for at in dense_ids]
        pulls["numpy searchsorted"] = lambda i, known=known: bisected.pull(known[i])
        pulls["dict of rows, a tenth"] = lambda i, few=few: mapping.pull(few[i])
        pushes["numpy searchsorted"] = lambda i, known=known: bisected.push(known[i], grads)
        pushes["torch sparse Adagrad"] = torch_adagrad(args.rows, dense_ids, torch.from_numpy(grads))
        report(f"pull, {kind}", medians(pulls, args.repeats, time.thread_time))
        report(f"push, {kind}", medians(pushes, args.repeats, time.thread_time))
        for name, table in tables.items():
            work = {
                "pull": lambda i, mine, table=table, keys=keys: table.pull(keys[i], out=mine),
                "push": lambda i, mine, table=table, keys=keys: table.push(keys[i], grads),
            }
            for verb, one in work.items():
                single, both = one_and_two_threads(one, args.repeats)
                print(f"{name}, {verb}, {kind}: two threads {both:.2f} M rows/s, {both / single:.2f} times one")
    if args.disk is not None:
        on_disk(tables["table (Hogwild)"], args.disk)


if __name__ == "__main__":
    main()
