"""Rows in a file (Table(arena=...)) that memory does not hold: pulls and pushes with and without read-ahead.

Run: python benchmarks/row_file.py [folder on the disk to measure] [--rows 4000000] [--dim 16]
Pages are dropped from memory before each cold batch. Both tables are made alike and take turns.
"""

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from plsc import ps

BATCH, ROUNDS = 65_536, 5
MADV_DONTNEED = 4


def make(folder: str, rows: int, dim: int, *, read_ahead: bool, locked: bool) -> ps.Table:
    os.environ["PLSC_PS_READ_AHEAD"] = "1" if read_ahead else "0"
    table = ps.Table(dim, rule="adagrad", arena=folder, locked=locked)
    for start in range(0, rows, BATCH):
        table.pull(np.arange(start, min(start + BATCH, rows), dtype=np.uint64))
    return table


def drop(folder: str) -> None:
    """Writes what is dirty, unmaps the pages of this process' row files, and has the system forget them."""
    device = os.stat(folder).st_dev
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            told, path = os.fstat(int(name)), os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if told.st_dev == device and path.endswith(" (deleted)") and path.startswith(os.path.realpath(folder)):
            os.fsync(int(name))
            inodes.add((told.st_ino, int(name)))
    libc = ctypes.CDLL(None, use_errno=True)
    known = {inode for inode, _ in inodes}
    for line in Path("/proc/self/maps").read_text().splitlines():
        parts = line.split(maxsplit=5)
        if int(parts[4]) in known:
            start, end = (int(x, 16) for x in parts[0].split("-"))
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise")
    for _, number in inodes:
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=".")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=16)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for locked in (False, True):
            tables = {
                name: make(folder, args.rows, args.dim, read_ahead=name == "read ahead", locked=locked)
                for name in ("read ahead", "at the touch")
            }
            seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for _ in range(ROUNDS):
                for name, table in tables.items():
                    keys = random.integers(0, args.rows, BATCH, np.uint64)
                    grads = np.ones((BATCH, args.dim), np.float32)
                    for what, do in (
                        ("cold pull", lambda: table.pull(keys)),  # noqa: B023 - called at once
                        ("warm pull", lambda: table.pull(keys)),  # noqa: B023
                        ("cold push", lambda: table.push(keys, grads)),  # noqa: B023
                        ("warm push", lambda: table.push(keys, grads)),  # noqa: B023
                        ("cold save", lambda: table.save(f"{folder}/saved")),  # noqa: B023
                    ):
                        if what == "cold save" and (what, name) in seconds:  # once: it writes as much as there is
                            continue
                        if what.startswith("cold"):
                            drop(folder)
                        began, worked = time.perf_counter(), time.process_time()
                        do()
                        taken = time.perf_counter() - began, time.process_time() - worked
                        seconds.setdefault((what, name), []).append(taken)
            size = args.rows * args.dim * 8 / 2**20
            print(f"{'locked' if locked else 'hogwild'}, {args.rows:,} rows, {size:,.0f} MiB; rows/s of wall, of CPU")
            for what in ("cold pull", "warm pull", "cold push", "warm push", "cold save"):
                count = args.rows if what == "cold save" else BATCH
                rates = [
                    [count / statistics.median(x) for x in zip(*seconds[what, name], strict=True)] for name in tables
                ]
                words = "; ".join(
                    f"{name} {wall:,.0f}, {cpu:,.0f}" for name, (wall, cpu) in zip(tables, rates, strict=True)
                )
                wall, cpu = (a / b for a, b in zip(*rates, strict=True))
                print(f"  {what}: {words}; {wall:.2f} and {cpu:.2f} times", flush=True)
            tables.clear()


if __name__ == "__main__":
    main()
