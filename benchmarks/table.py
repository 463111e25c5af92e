"""Rows a second of the sparse table beside a bare gather, other tables in Python, FBGEMM and torch's sparse Adagrad.

    python benchmarks/table.py [fill] [peers] [threads] [disk] [--rows 5000000] [--ids 10000000] [--repeats 30]

Batches of 65,536 keys, uniform over the rows and Zipf(1.05) over the ids, dim 16, Adagrad; ids without a row get one as
they come. Without names all parts are run.

fill     rows a second of a bulk load beside a bare copy into new memory, the slowest batch while the table grows,
         bytes a row beyond its payload; in memory that the system has used before, since a virtual machine's host
         takes longer to give it out at first than a table takes to fill it
peers    pulls and pushes beside other tables. All take turns within one run, so that a noisy machine hurts them alike;
         medians of processor time and their ratios to the bare gather count, not single numbers. numba and
         fbgemm-gpu-cpu (1.8 beside torch 2.13) take part where they work. The bare hash table is a bound: what
         bare_table.c does in this process without locks, growth, checks or any other thing that a table is for. "Merged
         first" sums the gradients of a repeated key before the push, as FBGEMM and torch do inside theirs
threads  one and two in turn, by the clock on the wall: run those on a quiet machine
disk     saving beside writing and syncing as many bytes in --folder, loading beside reading them, none in memory
"""

import argparse
import ctypes
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.ps import Table, merge

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
        self.rows = dict(zip(keys.tolist(), values.copy(), strict=True))
        self.sums = {key: np.zeros(DIM, np.float32) for key in self.rows}

    def pull(self, keys: np.ndarray) -> np.ndarray:
        return np.stack([self.rows[key] for key in keys.tolist()])

    def push(self, keys: np.ndarray, grads: np.ndarray) -> None:
        for key, grad in zip(keys.tolist(), grads, strict=True):
            total = self.sums[key]
            total += grad * grad
            self.rows[key] -= LR * grad / (np.sqrt(total) + 1e-10)


class NumbaTable:
    """The table's design in numba: open addressing, linear probing, 16-byte slots, rows apart; no locks, no growth."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.slots = np.zeros((1 << int(len(keys) * 1.5).bit_length(), 2), np.uint64)  # key and row number + 1
        self.rows = np.concatenate([values, np.zeros_like(values)], axis=1)  # value and Adagrad's sums
        self.fill, self.read, self.step = numba_loops()
        self.fill(self.slots, keys)

    def pull(self, keys: np.ndarray, out: np.ndarray) -> None:
        self.read(self.slots, self.rows, keys, out)

    def push(self, keys: np.ndarray, grads: np.ndarray) -> None:
        self.step(self.slots, self.rows, keys, grads)


def numba_loops() -> tuple[Any, Any, Any]:
    from numba import njit

    @njit(nogil=True, inline="always")
    def home(key: np.uint64, mask: np.uint64) -> np.uint64:
        x = key ^ (key >> np.uint64(30))
        x *= np.uint64(0xBF58476D1CE4E5B9)
        return (x ^ (x >> np.uint64(27))) & mask

    @njit(nogil=True)
    def fill(slots, keys) -> None:  # type: ignore[no-untyped-def]
        mask = np.uint64(len(slots) - 1)
        for i in range(len(keys)):
            at = home(keys[i], mask)
            while slots[at, 1] != 0:
                at = (at + np.uint64(1)) & mask
            slots[at, 0], slots[at, 1] = keys[i], i + 1

    @njit(nogil=True, inline="always")
    def find(slots, key):  # type: ignore[no-untyped-def]
        mask = np.uint64(len(slots) - 1)
        at = home(key, mask)
        while slots[at, 1] != 0:
            if slots[at, 0] == key:
                return np.int64(slots[at, 1]) - 1
            at = (at + np.uint64(1)) & mask
        return -1

    @njit(nogil=True)
    def read(slots, rows, keys, out) -> None:  # type: ignore[no-untyped-def]
        for i in range(len(keys)):
            row = find(slots, keys[i])
            for d in range(DIM):
                out[i, d] = rows[row, d] if row >= 0 else 0.0

    @njit(nogil=True, error_model="numpy")
    def step(slots, rows, keys, grads) -> None:  # type: ignore[no-untyped-def]
        for i in range(len(keys)):
            row = find(slots, keys[i])
            if row >= 0:
                for d in range(DIM):
                    g = grads[i, d]
                    rows[row, DIM + d] += g * g
                    rows[row, d] -= np.float32(LR) * g / (np.sqrt(rows[row, DIM + d]) + np.float32(1e-10))

    return fill, read, step


class BareTable:
    """bare_table.c, compiled for this machine: the bound."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = f"{folder}/bare_table.so"
            source = Path(__file__).with_name("bare_table.c")
            flags = ["-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC"]
            subprocess.run(["gcc", *flags, source, "-o", library, "-lm"], check=True)
            self.native = ctypes.CDLL(library)
        bits = int(len(keys) * 1.5).bit_length()
        self.slots = np.zeros((1 << bits, 2), np.uint64)
        self.rows = np.concatenate([values, np.zeros_like(values)], axis=1)
        self.table = ctypes.c_void_p(self.slots.ctypes.data), ctypes.c_uint(64 - bits)
        self.native.fill(*self.table, *self.pointers(keys), ctypes.c_uint64(len(keys)))

    @staticmethod
    def pointers(*arrays: np.ndarray) -> list[ctypes.c_void_p]:
        return [ctypes.c_void_p(array.ctypes.data) for array in arrays]

    def pull(self, keys: np.ndarray, out: np.ndarray) -> None:
        rows, keys_at, out_at = self.pointers(self.rows, keys, out)
        self.native.pull(*self.table, rows, keys_at, ctypes.c_uint64(len(keys)), out_at)

    def push(self, keys: np.ndarray, grads: np.ndarray) -> None:
        rows, keys_at, grads_at = self.pointers(self.rows, keys, grads)
        self.native.push(*self.table, rows, keys_at, ctypes.c_uint64(len(keys)), grads_at, ctypes.c_float(LR))


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


def forget(path: Path) -> None:
    """Has the system drop a file's pages from memory, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def on_disk(table: Table, folder: Path, rounds: int) -> None:
    """Saving and loading beside writing (and syncing) and reading as many bytes, in turn."""
    path, bare = folder / "table", folder / "bare"
    block = os.urandom(1 << 20)

    def write() -> None:
        with bare.open("wb", buffering=0) as file:
            for start in range(0, path.stat().st_size, len(block)):
                file.write(block[: path.stat().st_size - start])
            os.fsync(file.fileno())

    def read() -> None:
        with bare.open("rb", buffering=0) as file:
            while file.readinto(block_read):
                pass

    block_read = bytearray(1 << 20)
    wall: dict[str, list[float]] = {"save": [], "write": [], "load": [], "read": []}
    cpu: dict[str, list[float]] = {name: [] for name in wall}
    work = {"save": lambda: table.save(path), "write": write, "load": lambda: Table.load(path), "read": read}
    for _ in range(rounds):
        for name, one in work.items():
            if name in ("load", "read"):
                forget(path if name == "load" else bare)
            start, used = time.perf_counter(), time.process_time()
            one()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - used)
    size = path.stat().st_size
    print(f"\n{len(table):,} rows, {size / 1e6:.0f} MB\n{'':8}{'MB/s':>8}{'range':>12}{'M rows/s':>10}{'/ CPU-s':>9}")
    for name, spent in wall.items():
        rates = size / np.array(spent) / 1e6
        rows = [len(table) / float(np.median(each)) / 1e6 for each in (spent, cpu[name])]
        print(
            f"{name:8}{np.median(rates):8.0f}{f'{rates.min():.0f}-{rates.max():.0f}':>12}{rows[0]:10.2f}{rows[1]:9.2f}"
        )
    for ours, theirs in (("save", "write"), ("load", "read")):
        print(f"{ours} / {theirs}: {np.median(wall[theirs]) / np.median(wall[ours]):.2f}")
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
    print(f"{'':16}{'M rows/s':>10}{'batch, ms':>11}{'slowest':>9}{'B/row beyond':>14}   (processor time)")
    used = np.ones((len(dense), 2 + len(tables), 2, DIM), np.float32)
    del used
    start = time.thread_time()
    fresh = np.empty((len(dense), 2, DIM), np.float32)
    fresh[:, 0], fresh[:, 1] = dense, 0.0
    print(f"{'bare copy':16}{len(dense) / (time.thread_time() - start) / 1e6:10.2f}   (into new memory, in order)")
    del fresh
    spent: dict[str, list[float]] = {name: [] for name in tables}
    for some in np.array_split(np.arange(len(dense)), max(1, len(dense) // BATCH)):
        keys, values = ids[some], dense[some]
        for name, table in tables.items():
            start = time.thread_time()
            table.assign(keys, values)
            spent[name].append(time.thread_time() - start)
    for name, table in tables.items():
        stats = table.stats()
        beyond = (stats["index_bytes"] + stats["arena_bytes"] - stats["payload_bytes"]) / len(dense)
        middle, most = 1e3 * float(np.median(spent[name])), 1e3 * max(spent[name])
        rate = len(dense) / sum(spent[name]) / 1e6
        print(f"{name:16}{rate:10.2f}{middle:11.1f}{most:9.1f}{beyond:14.1f}", flush=True)


def optional(what: str, make: Callable[[], Any]) -> Any:
    """A peer, or None where it does not work here, with the reason."""
    try:
        return make()
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        print(f"without {what}: {str(error).strip().splitlines()[0]}")
        return None


def peers(
    tables: dict[str, Table], ids: np.ndarray, dense: np.ndarray, batches: dict[str, list[np.ndarray]], repeats: int
) -> None:
    rows = len(dense)
    grads = np.random.default_rng(1).standard_normal((BATCH, DIM), np.float32)
    out = np.empty((BATCH, DIM), np.float32)
    tenth = rows // 10  # a dict of all rows would fill the memory
    bisected, mapping = SortedTable(ids[:rows], dense), DictTable(ids[:tenth], dense[:tenth])
    compiled = optional("numba", lambda: NumbaTable(ids[:rows], dense))
    fbgemm = optional("fbgemm-gpu-cpu", lambda: FbgemmTable(dense))
    bare = optional("the bare hash table", lambda: BareTable(ids[:rows], dense))
    for kind, drawn in batches.items():
        keys = [ids[batch] for batch in drawn]
        dense_ids = [batch % rows for batch in drawn]  # for what has no keys
        few = [ids[batch % tenth] for batch in drawn]
        known = [ids[at] for at in dense_ids]
        gather = lambda i, at=dense_ids: np.take(dense, at[i], axis=0, out=out, mode="clip")  # noqa: E731
        pulls: dict[str, Timed] = {"bare gather": gather}
        pushes: dict[str, Timed] = {"bare gather": gather}
        for name, table in tables.items():
            pulls[name] = lambda i, table=table, keys=keys: table.pull(keys[i], out=out)
            pushes[name] = lambda i, table=table, keys=keys: table.push(keys[i], grads)
        pushes["Hogwild, merged first"] = lambda i, keys=keys: tables["Hogwild"].push(*merge(keys[i], grads))
        if bare is not None:
            pulls["bare hash table"] = lambda i, keys=keys: bare.pull(keys[i], out)
            pushes["bare hash table"] = lambda i, keys=keys: bare.push(keys[i], grads)
        if compiled is not None:
            pulls["numba table"] = lambda i, keys=keys: compiled.pull(keys[i], out)
            pushes["numba table"] = lambda i, keys=keys: compiled.push(keys[i], grads)
        if fbgemm is not None:
            pulls["FBGEMM, ids are row numbers"] = lambda i, at=dense_ids: fbgemm.pull(at[i])
            pushes["FBGEMM, backward and update"] = fbgemm_push(fbgemm, dense_ids, torch.from_numpy(grads))
        pulls["numpy searchsorted"] = lambda i, known=known: bisected.pull(known[i])
        pushes["numpy searchsorted"] = lambda i, known=known: bisected.push(known[i], grads)
        pulls["dict of rows, a tenth"] = lambda i, few=few: mapping.pull(few[i])
        pushes["dict of rows, a tenth"] = lambda i, few=few: mapping.push(few[i], grads)
        pushes["torch sparse Adagrad"] = torch_adagrad(rows, dense_ids, torch.from_numpy(grads))
        report(f"pull, {kind}", medians(pulls, repeats, time.thread_time))
        report(f"push, {kind}", medians(pushes, repeats, time.thread_time))


def two_threads(tables: dict[str, Table], ids: np.ndarray, batches: dict[str, list[np.ndarray]], repeats: int) -> None:
    grads = np.random.default_rng(1).standard_normal((BATCH, DIM), np.float32)
    print()
    for kind, drawn in batches.items():
        keys = [ids[batch] for batch in drawn]
        for name, table in tables.items():
            work = {
                "pull": lambda i, mine, table=table, keys=keys: table.pull(keys[i], out=mine),
                "push": lambda i, mine, table=table, keys=keys: table.push(keys[i], grads),
            }
            for verb, one in work.items():
                single, both = one_and_two_threads(one, repeats)
                print(f"table, {name}, {verb}, {kind}: two threads {both:.2f} M rows/s, {both / single:.2f} times one")


PARTS = ("fill", "peers", "threads", "disk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without one")
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    args = parser.parse_args()
    parts = args.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}")
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    ids = np.arange(args.ids, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    dense = random.standard_normal((args.rows, DIM), np.float32)
    tables = {"Hogwild": Table(DIM, lr=LR), "locked": Table(DIM, lr=LR, locked=True)}
    fill(tables, ids[: args.rows], dense)
    if "disk" in parts:
        on_disk(tables["Hogwild"], args.folder, 3)
    batches = {kind: draw(kind, args.rows, args.ids, args.repeats, random) for kind in ("uniform", "zipf")}
    if "peers" in parts:
        peers(tables, ids, dense, batches, args.repeats)
    if "threads" in parts:
        two_threads(tables, ids, batches, args.repeats)


if __name__ == "__main__":
    main()
