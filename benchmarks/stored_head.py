"""A sampled head whose class centres lie in a table against the same head in memory: time of a step, memory of a class.

Run: python benchmarks/stored_head.py [folder on a disk] [--classes 1000000] [--dim 128] [--rate 0.01] [--batch 128]
     with --cold no row of a step is in memory; with --lazy rows are born when they are drawn, and only the table in a
     file is measured: python benchmarks/stored_head.py --lazy --classes 100000000 --dim 512 --rate 0.0001
Else all rows exist before the first step. The heads take turns; SGD with momentum.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from row_file import drop

import plsc
from plsc import ps

ROUNDS, WARM = 12, 3


def anonymous_mib() -> float:
    """Memory of this process that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=".")
    for name, default in (("classes", 1_000_000), ("dim", 128), ("batch", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--lazy", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

    def table(arena: str | None) -> ps.Table:
        made = ps.Table(args.dim, rule=ps.Momentum(weight_decay=5e-4), lr=0.1, init="normal", arena=arena)
        for start in range(0, 0 if args.lazy else args.classes, 65_536):
            made.pull(np.arange(start, min(start + 65_536, args.classes), dtype=np.uint64))
        return made

    def head(**options: object) -> plsc.ClassParallelHead:
        return plsc.ClassParallelHead(args.dim, args.classes, margin=plsc.CosFace(), sample_rate=args.rate, **options)

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(number)
        y = torch.randint(0, args.classes, (args.batch,), generator=g)
        return torch.randn(args.batch, args.dim, generator=g).requires_grad_(), y

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        makers: dict[str, Callable[[], plsc.ClassParallelHead]] = {
            "in memory": lambda: head(head_optimizer=plsc.SGD(0.1, 5e-4, momentum=0.9)),
            "table": lambda: head(weight=table(None)),
            "table in a file": lambda: head(weight=table(folder)),
        }
        if args.cold or args.lazy:
            del makers["table"]
        if args.lazy:
            del makers["in memory"]
        start = anonymous_mib()
        heads, held = {}, {}
        for name, make in makers.items():
            before = anonymous_mib()
            heads[name] = make()
            held[name] = (anonymous_mib() - before) * 2**20 / args.classes
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in heads}
        for step in range(ROUNDS):
            for name, each in heads.items():
                if args.cold:
                    drop(folder)
                x, y = batch(step)
                began, worked = time.perf_counter(), time.process_time()
                each(x, y).backward()
                taken = time.perf_counter() - began, time.process_time() - worked
                if step >= WARM:
                    seconds[name].append(taken)
        first = [statistics.median(each) for each in zip(*next(iter(seconds.values())), strict=True)]
        print(f"{args.classes:,} classes of {args.dim}, rate {args.rate}, batch {args.batch}")
        for name, taken in seconds.items():
            wall, cpu = (statistics.median(each) for each in zip(*taken, strict=True))
            print(
                f"  {name}: {1e3 * cpu:.0f} ms of CPU a step ({cpu / first[1]:.2f} of the first), "
                f"{1e3 * wall:.0f} of wall ({wall / first[0]:.2f}); {held[name]:.0f} bytes of memory a class"
            )
        print(f"  {anonymous_mib() - start:.0f} MiB of memory more than before the heads were made")


if __name__ == "__main__":
    main()
