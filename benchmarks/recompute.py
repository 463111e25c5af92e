"""What recomputation buys and costs: the largest batch under one memory cap and the time of a sample, by policy.

    python benchmarks/recompute.py            # iresnet50, vit_base, bert_large: half an hour on two quiet cores
    python benchmarks/recompute.py --models vit_base --repeats 1
    python benchmarks/recompute.py --quick    # vit_tiny: a minute or two

The cap is what a step of --batch-size samples takes without recomputation, weights and gradients not counted (they do
not grow with the batch). Activations are the peak of the process beyond what it had before the step (on a GPU, what
torch allocated), at three and at six times --batch-size, the latter being what is wanted: a line through both gives the
batch that fills the cap. The time of a sample is that of the larger step for every policy, "none" too. Each measurement
is a process of its own; a row is printed as soon as it is known.

The search tries "full", "selective", all blocks but the last (what that one keeps is there at the peak anyway), the
same with one product of each block kept (--product; attention's projection, a residual block's second convolution),
and lists of blocks: each block's activations and forward time are measured, and blocks are taken in the order of bytes
saved a second, as many as --slowdowns allow. --policies names your own instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from models import blocks_of, make, make_input
from torch import Tensor, nn

from plsc.strategies import recompute

WANTED = 6  # times the batch


def step_of(net: nn.Module, x: Tensor) -> None:
    net.zero_grad(set_to_none=False)
    net(x).square().mean().backward()


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def one(args: argparse.Namespace) -> dict[str, float]:
    """In a process of its own: peak bytes beyond the model's, and the quickest of some steps."""
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = recompute(make(args.model).to(device), args.policy)
    step_of(net, make_input(args.model, 2, 0).to(device))  # gradients are there, and what torch loads late
    x = make_input(args.model, args.batch, 0).to(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = status("VmRSS")
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter() if device.type == "cuda" else time.process_time()
        step_of(net, x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() if device.type == "cuda" else time.process_time()) - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else status("VmHWM")
    return {"bytes": float(peak - before), "seconds": min(times)}


def measure(args: argparse.Namespace, model: str, policy: str, batch: int) -> dict[str, float]:
    words = [sys.executable, __file__, "--one", "--model", model, "--policy", policy, "--batch", str(batch)]
    words += ["--repeats", str(args.repeats), "--threads", str(args.threads)]
    # Large tensors as mappings of their own: what is freed is given back, so that the peak is a peak.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{model}, {policy}, {batch} samples: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def look_at_blocks(model: str, batch: int) -> list[tuple[float, float]]:
    """Of each block: bytes that it keeps for its backward, and seconds of its forward."""
    net, found = make(model), []
    starts: dict[nn.Module, float] = {}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def before(block: nn.Module, _: Any) -> None:
        kept.clear()
        starts[block] = time.process_time()

    def after(block: nn.Module, _: Any, __: Any) -> None:
        took = time.process_time() - starts[block]
        own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        found.append((float(sum(size for at, size in kept.items() if at not in own)), took))

    for block in blocks_of(net):
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
    x = make_input(model, batch, 0)
    for _ in range(2):  # the first is a warm-up
        found.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            net(x)
    return found


def listed(blocks: list[tuple[float, float]], step: float, slowdown: float) -> str:
    """Blocks that save most a second of forward, as many as a step may take longer; as a policy."""
    order = sorted(range(len(blocks)), key=lambda at: -blocks[at][0] / blocks[at][1])
    chosen, spent = [], 0.0
    for at in order:
        if spent + blocks[at][1] <= slowdown * step:
            chosen.append(at)
            spent += blocks[at][1]
    return "blocks:" + ",".join(map(str, sorted(chosen))) if chosen else "none"


def search(args: argparse.Namespace, model: str, seconds: float) -> list[str]:
    """The policies to try; seconds: of a plain step of --batch-size."""
    blocks = look_at_blocks(model, args.batch_size)
    product = args.product if args.product is not None else 1 if model.startswith("iresnet") else 2
    spared = f"blocks:0-{len(blocks) - 2}"
    found = ["full", "selective", spared, f"{spared} selective:{product}"]
    found += [listed(blocks, seconds, slowdown) for slowdown in args.slowdowns]
    return [policy for policy in dict.fromkeys(found) if policy != "none"]


def table(args: argparse.Namespace, model: str) -> None:
    batch = args.batch_size
    plain, many = measure(args, model, "none", batch), measure(args, model, "none", WANTED * batch)
    cap, per_sample = plain["bytes"], many["seconds"] / (WANTED * batch)
    each = (many["bytes"] - cap) / ((WANTED - 1) * batch) / 2**20
    print(f"\n{model}: cap {cap / 2**20:.0f} MiB, {batch} samples\n")
    print("| policy | MiB a sample | largest batch | of plain | ms a sample | slower |\n|---|---|---|---|---|---|")
    print(
        f"| none | {each:.2f} | {batch} | 1.0 | {1e3 * per_sample:.1f} | |",
        flush=True,
    )
    best = ("none", 1.0, 0.0)
    for policy in args.policies or search(args, model, plain["seconds"]):
        half, many = (measure(args, model, policy, times * batch) for times in (WANTED // 2, WANTED))
        slope = max((many["bytes"] - half["bytes"]) / (WANTED // 2 * batch), 1.0)
        fits = max(int(WANTED * batch + (cap - many["bytes"]) / slope), 1)
        took = many["seconds"] / (WANTED * batch)
        grows, slower = fits / batch, took / per_sample - 1
        cells = [policy, f"{slope / 2**20:.2f}", str(fits), f"{grows:.1f}", f"{1e3 * took:.1f}", f"{slower:+.0%}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        if slower <= 0.2 and grows > best[1]:
            best = (policy, grows, slower)
    name, grows, slower = best
    print(
        f"\nbest at no more than 20 % slower: {name}, {grows:.1f} times the batch, {slower:+.0%}; wanted {WANTED}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="largest batch under a memory cap and its cost, by recompute policy")
    parser.add_argument("--models", nargs="+", default=["iresnet50", "vit_base", "bert_large"])
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--policies", nargs="+", help="these, instead of a search")
    parser.add_argument("--product", type=int, help="the product that is kept of each block")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slowdowns", nargs="+", type=float, default=[0.1, 0.2])
    parser.add_argument("--quick", action="store_true", help="vit_tiny")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    for name in ("--model", "--policy"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args)))
        return
    if args.quick:
        args.models = ["vit_tiny"]
    print(f"torch {torch.__version__}, {args.threads} thread(s), times are processor time on CPUs")
    for model in args.models:
        table(args, model)


if __name__ == "__main__":
    main()
