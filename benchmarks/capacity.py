"""How many classes train under a memory cap: class-parallel heads against data-parallel and model-parallel autograd.

    python benchmarks/capacity.py                        # two gloo ranks under one cap of 4 GiB: ten minutes
    python benchmarks/capacity.py --cap-gb 1 --only data "fp32"                      # a minute
    python benchmarks/capacity.py --demo 5000000         # one run without a cap: 15.4 GB of weight and momentum

A contender is asked to take ten steps (forward, backward, SGD with momentum) of B embeddings of D numbers with C
classes. Two small numbers of classes tell what a class takes; the C that would just fit is then tried for three steps,
and C a little above or below until one trains and one --precision above it does not; that one then takes its ten. The
cap holds for both ranks together: a memory cgroup where one can be made (as root, version 1 or 2), else the sum of
their peaks as the kernel counted them, without the pages of files. Linux only.

    data            every rank has the whole weight; logits of its own samples; gradients averaged
    model           classes cut over the ranks; logits of all samples with its classes, exact softmax by autograd
    fp32            ClassParallelHead, weight and momentum as data and model have them
    split, bf16     weight_dtype="split", momentum in bfloat16
    bf16, bf16      weight in bfloat16, momentum in bfloat16;  bf16, int8: in int8
    fp32, 0.1       fp32 with sample_rate=0.1

"bf16, int8" is tried where --only says so. --demo trains the contender "split, bf16" (or --only one) and prints the
loss of every step; the same few samples come again and again, so it must fall.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import plsc
from plsc import ops
from plsc.comm import Communicator, Shard, connect

SCALE, MARGIN, LR, MOMENTUM, STEPS = 64.0, 0.5, 1e-2, 0.9, 10
HEADS = {
    "fp32": ("fp32", "fp32", 1.0),
    "split, bf16": ("split", "bf16", 1.0),
    "bf16, bf16": ("bf16", "bf16", 1.0),
    "bf16, int8": ("bf16", "int8", 1.0),
    "fp32, 0.1": ("fp32", "fp32", 0.1),
}
NAMES = ["data", "model", *HEADS]
USUAL = [name for name in NAMES if name != "bf16, int8"]
# Of 512 numbers, about: what the small runs begin with.
BYTES = {"data": 41_000, "model": 22_000, "fp32": 4100, "split, bf16": 3080, "bf16, bf16": 2060, "bf16, int8": 1550}
SMALL = (0.1, 0.3)  # of what the cap could hold
PROCESSES = 2**29  # bytes of two processes that hold nothing yet, about
SEARCH_STEPS = 3  # by then everything that a contender keeps is there; what is found then takes all its steps
PATIENCE = 300.0  # seconds of an attempt: near its cap a process may also reread its own code for ever
Step = Callable[[Tensor, Tensor], Tensor]  # this rank's embeddings and labels -> its loss, everything updated


# ---- the contenders


def data_parallel(classes: int, dim: int, comm: Communicator) -> Step:
    weight = torch.nn.Parameter(torch.randn(classes, dim).mul_(0.01))
    optimizer = torch.optim.SGD([weight], LR, momentum=MOMENTUM)

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = F.normalize(x) @ F.normalize(weight).T
        at = torch.arange(len(y))
        logits[at, y] = plsc.ArcFace(SCALE, MARGIN).target(logits[at, y])
        loss = F.cross_entropy(logits * SCALE, y)
        loss.backward()
        assert weight.grad is not None
        comm.all_reduce(weight.grad.div_(comm.world_size)).wait()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def model_parallel(classes: int, dim: int, comm: Communicator) -> Step:
    shard = Shard.of(classes, comm)
    weight = torch.nn.Parameter(torch.randn(shard.size, dim).mul_(0.01))
    optimizer = torch.optim.SGD([weight], LR, momentum=MOMENTUM)

    def step(x: Tensor, y: Tensor) -> Tensor:
        samples, labels = ops.all_gather(F.normalize(x), comm), comm.all_gather(y).wait()
        logits = samples @ F.normalize(weight).T  # [B, C_local]
        mine = (labels >= shard.start) & (labels < shard.stop)
        at, own = mine.nonzero().squeeze(1), labels[mine] - shard.start
        logits[at, own] = plsc.ArcFace(SCALE, MARGIN).target(logits[at, own])
        logits = logits * SCALE
        largest = comm.all_reduce(logits.detach().amax(1), "max").wait()
        total = ops.all_reduce((logits - largest[:, None]).exp().sum(1), comm)
        target = ops.all_reduce(torch.zeros_like(total).index_put((at,), logits[at, own]), comm)
        loss = (total.log() + largest - target).mean()
        (loss / comm.world_size).backward()  # every rank has the whole loss
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def class_parallel(name: str, classes: int, dim: int, comm: Communicator, cache_mb: float) -> Step:
    weight_dtype, state_dtype, rate = HEADS[name]
    head = plsc.ClassParallelHead(
        dim,
        classes,
        margin=plsc.ArcFace(SCALE, MARGIN),
        comm=comm,
        sample_rate=rate,
        weight_dtype=weight_dtype,
        head_optimizer=plsc.SGD(LR, momentum=MOMENTUM, state_dtype=state_dtype),
        cache_mb=cache_mb,
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = head(x, y)
        loss.backward()
        return loss.detach()

    return step


# ---- one rank


def work(args: argparse.Namespace) -> None:
    """Trains as one of the ranks that `attempt` started; rank 0 prints the losses, each its peak in bytes."""
    torch.set_num_threads(1)
    comm, name = connect("gloo"), args.work
    torch.manual_seed(0)
    if name == "data":
        step = data_parallel(args.classes, args.dim, comm)
    elif name == "model":
        step = model_parallel(args.classes, args.dim, comm)
    else:
        step = class_parallel(name, args.classes, args.dim, comm, args.cache_mb)
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(2, args.batch, args.dim, generator=generator)  # two batches in turn
    labels = torch.randint(0, args.classes, (2, args.batch), generator=generator)
    own = Shard.of(args.batch, comm)
    for number in range(args.steps):
        begin = time.perf_counter()
        x, y = samples[number % 2, own.start : own.stop], labels[number % 2, own.start : own.stop]
        loss = step(x.clone().requires_grad_(), y)
        mean = float(comm.all_reduce(loss.clone()).wait()) / comm.world_size
        assert mean == mean, "the loss is not a number"
        if comm.rank == 0 and args.demo:
            print(f"step {number + 1:3d}  loss {mean:9.4f}  {time.perf_counter() - begin:6.1f} s", flush=True)
    status = Path("/proc/self/status").read_text()
    most, files = (int(status.split(key)[1].split()[0]) * 1024 for key in ("VmHWM:", "RssFile:"))
    print(f"peak {most - files}", flush=True)
    comm.close()


# ---- the cap


class Cap:
    """A memory cgroup of its own for each attempt, or none where that is not allowed."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        root = Path("/sys/fs/cgroup")
        self.folder = (root / "memory" if (root / "memory").is_dir() else root) / f"plsc-capacity-{os.getpid()}"
        self.limit = "memory.limit_in_bytes" if self.folder.parent.name == "memory" else "memory.max"
        try:
            self.folder.mkdir()
            (self.folder / self.limit).write_text(str(num_bytes))
            self.works = True
        except OSError:
            self.works = False
        for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            if (self.folder / swap).exists():
                (self.folder / swap).write_text("0" if swap.endswith("max") else str(num_bytes))

    def prefix(self) -> list[str]:
        """In front of a command that shall run under the cap."""
        if not self.works:
            return []
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def close(self) -> None:
        if self.folder.is_dir():
            self.folder.rmdir()


def attempt(
    name: str, classes: int, args: argparse.Namespace, cap: Cap | None, *, steps: int, must: bool = False
) -> int:
    """Bytes that two ranks took to get through their steps, 0 if they did not; without a cap they print themselves.

    must: it is expected to get through, and what a rank says if not is passed on.
    """
    command = [sys.executable, __file__, "--work", name, "--classes", str(classes), "--steps", str(steps)]
    command += ["--dim", str(args.dim), "--batch", str(args.batch), "--cache-mb", str(args.cache_mb)]
    command += ["--demo", "1"] if cap is None else []
    args.port += 1
    started = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(args.port), "OMP_NUM_THREADS": "1"}
        prefix = [] if cap is None else cap.prefix()
        out = subprocess.PIPE if cap is not None else None
        errors = None if must or cap is None else subprocess.DEVNULL  # killed for lack of memory is no news
        started.append(subprocess.Popen([*prefix, *command], env=env, stdout=out, stderr=errors, text=True))
    begin = time.monotonic()
    while any(process.poll() is None for process in started):
        late = cap is not None and time.monotonic() - begin > PATIENCE
        if late or any(process.poll() not in (None, 0) for process in started):
            for process in started:  # the other would wait for the lost one
                process.send_signal(signal.SIGKILL)
        time.sleep(0.2)
    peaks = [int(line.split()[1]) for p in started if p.stdout for line in p.stdout if line.startswith("peak")]
    total = 1 if cap is None else sum(peaks)
    fits = not any(process.returncode for process in started) and (cap is None or cap.works or total <= cap.num_bytes)
    if args.verbose:
        told = f"{total / 2**30:.2f} GiB" if fits else "no"
        print(f"  {name}: {classes:,} classes, {told}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return total if fits else 0


def largest(name: str, args: argparse.Namespace, cap: Cap) -> int:
    """The most classes that train, to args.precision: a line through two small runs, then up or down to the edge."""
    guess = max(cap.num_bytes - PROCESSES, PROCESSES / 8) / (BYTES.get(name, 4100) * args.dim / 512)
    small = [int(guess * share) for share in SMALL]
    peaks = [attempt(name, classes, args, cap, steps=SEARCH_STEPS, must=True) for classes in small]
    if not all(peaks):
        return 0
    each = (peaks[1] - peaks[0]) / (small[1] - small[0])
    classes = int(small[1] + (cap.num_bytes - peaks[1]) / each)
    low, high, step = small[1], 0, args.precision
    while not high or high > low * (1 + args.precision):
        peak = attempt(name, classes, args, cap, steps=SEARCH_STEPS)
        if peak:
            low = classes
        else:
            high = classes
        if not high:
            classes = int(max(low * (1 + step), low + (cap.num_bytes - peak) / each))
        elif low == small[1]:
            classes = max(int(high * (1 - step)), low)
        else:
            classes = (low + high) // 2
        step *= 1.5
        if classes <= small[1]:
            break
    while not attempt(name, low, args, cap, steps=args.steps):
        low = int(low * (1 - args.precision))
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description="the largest number of classes that trains under a memory cap")
    parser.add_argument("--cap-gb", type=float, default=4.0, help="GiB of both ranks together")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="samples of both ranks together")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--cache-mb", type=float, default=0.0, help="exponentials that a class-parallel head keeps")
    parser.add_argument("--precision", type=float, default=0.04, help="of the largest number of classes")
    parser.add_argument("--only", nargs="+", choices=NAMES, help=f"default: {', '.join(map(repr, USUAL))}")
    parser.add_argument("--verbose", action="store_true", help="say every attempt")
    parser.add_argument("--port", type=int, default=29631)
    parser.add_argument("--demo", type=int, help="train once with so many classes, without a cap")
    parser.add_argument("--work", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--classes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    if args.demo:
        name = args.only[0] if args.only else "split, bf16"
        print(f"{name}: {args.demo:,} classes of {args.dim}, two ranks", flush=True)
        sys.exit(0 if attempt(name, args.demo, args, None, steps=args.steps) else 1)
    cap = Cap(int(args.cap_gb * 2**30))
    how = "a memory cgroup" if cap.works else "the sum of the ranks' peaks"
    print(f"cap {args.cap_gb:g} GiB ({how}), two gloo ranks, B={args.batch}, D={args.dim}, {args.steps} steps\n")
    print("| | classes | / data | / model | bytes of the cap a class |\n|---|---|---|---|---|", flush=True)
    found: dict[str, int] = {}
    try:
        for name in args.only or USUAL:
            found[name] = classes = largest(name, args, cap)
            ratios = [f"{classes / found[base]:.1f}" if found.get(base) else "" for base in ("data", "model")]
            print(
                f"| {name} | {classes:,} | {' | '.join(ratios)} | {cap.num_bytes / max(classes, 1):,.0f} |", flush=True
            )
    finally:
        cap.close()


if __name__ == "__main__":
    main()
