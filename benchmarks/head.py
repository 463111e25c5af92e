"""Compares one training step of the class-parallel ArcFace head with plain autograd, a peer, and the bare products.

    python benchmarks/head.py                        # batches of 128 and 512, 20,000 and 100,000 classes: minutes
    python benchmarks/head.py --quick                # 20,000 classes: a minute
    python benchmarks/head.py --classes 500000 --batches 128 --only plain fused "fused, cache 0" "3 products"
    python benchmarks/head.py --batches 64 128 --only pml plain fused "3 products"
    python benchmarks/head.py --only "plain, clipped" "fused, clipped" "fused, cache 0, clipped" "6 products"
    python benchmarks/head.py --ranks 2              # classes cut over two gloo ranks; plain has one rank's share

A step is forward, backward and SGD with momentum for B embeddings of D numbers and a weight of C classes. Contenders
work on the same weight and momentum, one step each in turn; medians over the rounds are shown, wall and processor time.

    plain           normalize, one matrix product, the margin on own entries, cross_entropy, torch.optim.SGD
    pml             ArcFaceLoss of pytorch-metric-learning (pip install pytorch-metric-learning), torch.optim.SGD
    separate        ClassParallelHead, torch.optim.SGD
    fused           ClassParallelHead(head_optimizer=plsc.SGD): rows are updated inside the backward
    fused, cache 0  the same without kept exponentials: one more matrix product
    fused, bf16     exponentials kept in bfloat16
    split, bf16     weight_dtype="split", momentum in bfloat16; "bf16, int8": weight in bfloat16, momentum in int8
    fused, 0.1      sample_rate=0.1
    ..., clipped    with torch's clip_grad_norm_; ours with the rows' step after their norm, as Fleet.step takes it
    3 / 4 products  only the matrix products of fused (6 B C D operations) and of cache 0 (8 B C D), block by block
    6 products      those of a clipped step of cache 0: exponentials and gradient twice after the forward
    0.1, bare       rows and momentum of a sample gathered, 3 products, both scattered back

"CPU / bare" compares with these: cache 0 with 4 products (clipped 6), 0.1 with its own, all others with 3 products.
PLSC_KERNELS=0 takes the torch operations instead of the C++ kernels.

The heap is kept mapped while times are taken, as a caching allocator on a GPU does it: otherwise plain pays as much for
fresh pages as for its arithmetic (--fresh-pages shows that). Memory is the peak of a process of its own during two
steps, with the stock allocator, beyond weight, momentum and what torch itself takes. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

import plsc
from plsc.comm import Communicator, Shard, connect, world
from plsc.nn.class_parallel import block_rows
from plsc.ops import deferred_updates, sample_classes
from plsc.ops.formats import split

LR, MOMENTUM, SCALE, MARGIN, CLIP = 1e-3, 0.9, 64.0, 0.5, 1e-3
OURS: dict[str, dict[str, Any]] = {
    "separate": {},
    "fused": {},
    "fused, cache 0": {"cache_mb": 0.0},
    "fused, bf16": {"cache_dtype": "bf16"},
    "split, bf16": {"weight_dtype": "split", "state_dtype": "bf16"},
    "bf16, int8": {"weight_dtype": "bf16", "state_dtype": "int8"},
    "fused, 0.1": {"sample_rate": 0.1},
    "fused, clipped": {},
    "fused, cache 0, clipped": {"cache_mb": 0.0},
}
NAMES = ["plain", "plain, clipped", "pml", *OURS, "3 products", "4 products", "6 products", "0.1, bare"]
USUAL = [name for name in NAMES if "clipped" not in name and name != "6 products"]
BOUNDS = {
    "fused, cache 0": "4 products",
    "4 products": "4 products",
    "fused, cache 0, clipped": "6 products",
    "6 products": "6 products",
    "fused, 0.1": "0.1, bare",
    "0.1, bare": "0.1, bare",
}
EXACT = ["separate", "fused", "fused, cache 0", "fused, bf16"]  # whose gradients are compared with float64
Step = Callable[[], None]


class Data:
    """A batch near its own classes, as late in training, and a weight; with a rank's share of both."""

    def __init__(self, batch: int, classes: int, dim: int, comm: Communicator) -> None:
        generator = torch.Generator().manual_seed(0)
        self.classes, self.comm, self.shard = classes, comm, Shard.of(classes, comm)
        self.weight = torch.randn(self.shard.size, dim, generator=generator).mul_(0.05)
        self.momentum = torch.zeros_like(self.weight).fill_(1e-9)
        self.rows = torch.randint(0, self.shard.size, (batch,), generator=generator)  # own classes, had a rank all
        noise = torch.randn(batch, dim, generator=generator) * 0.05
        self.x = self.weight[self.rows] + noise
        self.own = slice(comm.rank * batch // comm.world_size, (comm.rank + 1) * batch // comm.world_size)


def keep_heap() -> None:
    """Tells glibc to give no memory back and to take none by mmap (M_TRIM_THRESHOLD, M_MMAP_MAX)."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-1, 2**31 - 1)
    libc.mallopt(-4, 0)


def contender(name: str, data: Data, block: int | None) -> Step:
    """One training step of a contender, ready to be called again and again."""
    if name.startswith("plain"):
        return plain(data, clip="clipped" in name)
    if name == "pml":
        return peer(data)
    if name.endswith("products"):
        return products(data, block, num=int(name[0]))
    if name == "0.1, bare":
        return bare_sample(data, block)
    return ours(name, data, block)


def plain(data: Data, *, clip: bool = False) -> Step:
    """What one writes first: [B, C] logits, a normalised copy of the weight, a whole gradient."""
    weight = torch.nn.Parameter(data.weight)
    optimizer = torch.optim.SGD([weight], LR, momentum=MOMENTUM)
    optimizer.state[weight]["momentum_buffer"] = data.momentum
    x, at = data.x.clone().requires_grad_(), torch.arange(len(data.x))

    def step() -> None:
        x.grad = None
        plain_loss(x, weight, data.rows, at).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([weight], CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peer(data: Data) -> Step:
    """The loss of pytorch-metric-learning, whose weight is [D, C]; margin in degrees."""
    from pytorch_metric_learning.losses import ArcFaceLoss

    loss_of = ArcFaceLoss(len(data.weight), data.weight.shape[1], margin=math.degrees(MARGIN), scale=SCALE)
    loss_of.W.data = data.weight.T.contiguous()
    optimizer = torch.optim.SGD(loss_of.parameters(), LR, momentum=MOMENTUM)
    x = data.x.clone().requires_grad_()

    def step() -> None:
        x.grad = None
        loss_of(x, data.rows).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_loss(x: Tensor, weight: Tensor, labels: Tensor, at: Tensor) -> Tensor:
    logits = F.normalize(x) @ F.normalize(weight).T  # [B, C]
    logits[at, labels] = plsc.ArcFace(SCALE, MARGIN).target(logits[at, labels])
    return F.cross_entropy(logits * SCALE, labels)


def ours(name: str, data: Data, block: int | None) -> Step:
    head = make_head(name, data, block)
    x = data.x[data.own].clone().requires_grad_()
    labels = data.rows[data.own] + data.shard.start
    optimizer = None

    def clipped() -> None:
        x.grad = None
        with deferred_updates() as updates:
            head(x, labels).backward()
        norm = float(updates[0].square().sqrt())
        updates[0].apply(min(1.0, CLIP / norm))

    if "clipped" in name:
        return clipped
    if name == "separate":
        optimizer = torch.optim.SGD([head.weight], LR, momentum=MOMENTUM)
        optimizer.state[head.weight]["momentum_buffer"] = data.momentum

    def step() -> None:
        x.grad = None
        head(x, labels).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def make_head(name: str, data: Data, block: int | None) -> plsc.ClassParallelHead:
    options = dict(OURS[name])
    kept = options.pop("state_dtype", "fp32")
    head = plsc.ClassParallelHead(
        data.weight.shape[1],
        data.classes,
        margin=plsc.ArcFace(SCALE, MARGIN),
        comm=data.comm,
        head_optimizer=None if name == "separate" else plsc.SGD(LR, momentum=MOMENTUM, state_dtype=kept),
        block=block,
        **options,
    )
    if head.weight_dtype == "split":
        head.weight.data, head.row_low = split(data.weight)
    else:
        head.weight.data = data.weight.to(head.weight.dtype)  # in fp32 everybody's
    if name != "separate" and kept == "fp32":
        head.row_momentum = data.momentum
    return head


def products(data: Data, block: int | None, *, num: int, weight: Tensor | None = None) -> Step:
    """The matrix products alone, into buffers that exist: what the processor could do at best."""
    x, batch, dim = data.x, *data.x.shape
    weight = data.weight if weight is None else weight
    block = block or block_rows(batch, dim)
    logits, grad, output = torch.empty(batch, block), torch.empty(block, dim), torch.zeros(batch, dim)

    def step() -> None:
        for start in range(0, len(weight), block):
            rows = weight[start : start + block]
            part = logits.flatten()[: batch * len(rows)].view(batch, len(rows))
            for _ in range(num - 2):
                torch.mm(x, rows.T, out=part)
            torch.addmm(output, part, rows, beta=0.0, out=output)
            torch.mm(part.T, x, out=grad[: len(rows)])

    return step


def bare_sample(data: Data, block: int | None) -> Step:
    """A tenth of the rows with their momentum gathered, the three products, and both put back."""
    rows, _ = sample_classes(data.rows + data.shard.start, data.shard, rate=0.1, seed=0, step=0)
    taken = [torch.empty(len(rows), data.weight.shape[1]) for _ in range(2)]
    multiply = products(data, block, num=3, weight=taken[0])

    def step() -> None:
        for whole, part in zip((data.weight, data.momentum), taken, strict=True):
            torch.index_select(whole, 0, rows, out=part)
        multiply()
        for whole, part in zip((data.weight, data.momentum), taken, strict=True):
            whole.index_copy_(0, rows, part)

    return step


def measure(steps: dict[str, Step], rounds: int, comm: Communicator) -> dict[str, tuple[list[float], list[float]]]:
    """Wall and processor seconds (mean over ranks) of each contender in each round."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            comm.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            cpu = time.process_time() - cpu
            comm.barrier()
            wall = time.perf_counter() - wall
            if turn:  # the first is a warm-up
                times[name][0].append(wall)
                times[name][1].append(statistics.mean(comm.gather_objects(cpu)))
    return times


def peak_memory(name: str, batch: int, classes: int, dim: int, block: int | None) -> float:
    """MiB beyond what was there before, in this process; Linux only."""
    comm = world()
    contender(name, Data(8, 256, dim, comm), block)()  # loads what torch loads late
    data = Data(batch, classes, dim, comm)
    step = contender(name, data, block)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    for _ in range(2):
        step()
    return (status("VmHWM") - before) / 1024


def status(key: str) -> int:
    """A line of /proc/self/status in kB."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def errors(batch: int, classes: int, dim: int) -> str:
    """Relative error of loss and gradients against plain autograd in float64, as a table."""
    data = Data(batch, classes, dim, world())
    at = torch.arange(batch)

    def of_plain(dtype: torch.dtype) -> list[Tensor]:
        x, w = (v.to(dtype, copy=True).requires_grad_() for v in (data.x, data.weight))
        loss = plain_loss(x, w, data.rows, at)
        return [loss.detach(), *torch.autograd.grad(loss, [x, w])]

    truth = of_plain(torch.float64)
    found = {"plain": of_plain(torch.float32)}
    for name in EXACT:
        head, x = make_head(name, data, None), data.x.clone().requires_grad_()
        head.weight.data, kept = data.weight.clone(), torch.zeros_like(data.weight)
        if head.head_optimizer is not None:
            head.row_momentum = kept
        loss = head(x, data.rows)
        loss.backward()
        assert x.grad is not None
        found[name] = [loss.detach(), x.grad, kept if head.weight.grad is None else head.weight.grad]
    lines = ["| | loss | dx | dW |", "|---|---|---|---|"]
    for name, values in found.items():
        relative = [float((v.double() - t).norm() / t.norm()) for v, t in zip(values, truth, strict=True)]
        lines.append(f"| {name} | " + " | ".join(f"{r:.1e}" for r in relative) + " |")
    return "\n".join(lines)


def run(args: argparse.Namespace, comm: Communicator) -> None:
    torch.set_num_threads(args.threads)
    if not args.fresh_pages:
        keep_heap()
    if comm.rank == 0:
        print(f"D={args.dim}, {comm.world_size} rank(s) of {args.threads} thread(s), torch {torch.__version__}\n")
        print("| B | C | | wall s | range | CPU s | wall / plain | CPU / plain | CPU / bare | memory MiB |")
        print("|---|---|---|---|---|---|---|---|---|---|")
    for classes in args.classes:
        for batch in args.batches:
            data = Data(batch, classes, args.dim, comm)
            times = measure({name: contender(name, data, args.block) for name in args.only}, args.rounds, comm)
            if comm.rank == 0:
                for line in rows(times, batch, classes, args):
                    print(line, flush=True)
    if comm.world_size == 1 and not args.no_errors:
        print(f"\nRelative error against float64, B={args.batches[0]}, C={args.classes[0]}\n")
        print(errors(args.batches[0], args.classes[0], args.dim))


def rows(
    times: dict[str, tuple[list[float], list[float]]], batch: int, classes: int, args: argparse.Namespace
) -> Iterator[str]:
    wall = {name: statistics.median(t[0]) for name, t in times.items()}
    cpu = {name: statistics.median(t[1]) for name, t in times.items()}
    for name, (walls, _) in times.items():
        memory = f"{memory_of(name, batch, classes, args):.0f}" if args.ranks == 1 and not args.no_memory else ""
        cells = [
            f"{batch} | {classes:,} | {name} | {wall[name]:.3f} | {min(walls):.3f}-{max(walls):.3f} | {cpu[name]:.3f}"
        ]
        for value, base in ((wall, "plain"), (cpu, "plain"), (cpu, BOUNDS.get(name, "3 products"))):
            cells.append(f"{value[name] / value[base]:.2f}" if base in value else "")
        yield f"| {' | '.join([*cells, memory])} |"


def memory_of(name: str, batch: int, classes: int, args: argparse.Namespace) -> float:
    sizes = ["--dim", str(args.dim), "--batches", str(batch), "--classes", str(classes)]
    sizes += ["--threads", str(args.threads)] + (["--block", str(args.block)] if args.block else [])
    command = [sys.executable, __file__, "--memory-of", name, *sizes]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def one_rank(rank: int, args: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    comm = connect("gloo")
    run(args, comm)
    comm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="a training step of a large softmax head against plain autograd")
    parser.add_argument("--classes", type=int, nargs="+", help="default: 20000 100000")
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 512], help="samples of all ranks together")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--block", type=int, help="classes of one pass (default: as the head chooses)")
    parser.add_argument("--ranks", type=int, default=1, help="gloo processes that share the classes")
    parser.add_argument("--port", type=int, default=29531)
    parser.add_argument("--only", nargs="+", choices=NAMES, help="default: all that are installed, none clipped")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-errors", action="store_true", help="no comparison with float64")
    parser.add_argument("--fresh-pages", action="store_true", help="time with the stock allocator")
    parser.add_argument("--quick", action="store_true", help="20,000 classes, 3 rounds")
    parser.add_argument("--memory-of", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.classes = args.classes or ([20_000] if args.quick else [20_000, 100_000])
    args.rounds = args.rounds or (3 if args.quick else 5)
    has_peer = importlib.util.find_spec("pytorch_metric_learning") is not None
    args.only = args.only or [name for name in USUAL if name != "pml" or (has_peer and args.ranks == 1)]
    if args.memory_of:
        torch.set_num_threads(args.threads)
        print(peak_memory(args.memory_of, args.batches[0], args.classes[0], args.dim, args.block))
    elif args.ranks > 1:
        mp.spawn(one_rank, (args,), nprocs=args.ranks)
    else:
        run(args, world())


if __name__ == "__main__":
    main()
