"""Measures whole training steps of known models on several ranks: our Reducer beside DDP and FSDP2, in one run.

    python benchmarks/models.py          # all models, 2 and 4 ranks, loopback and 1 Gbit/s: two hours on two cores
    python benchmarks/models.py --batch-size 2 --rounds 2 --steps 1   # the same rows with fewer steps: half an hour
    python benchmarks/models.py --models vit_base --ranks 2 --links loopback
    python benchmarks/models.py --quick  # two small models, two ranks, loopback: a minute

Models: iresnet50 and vit_base at 112 pixels, bert_base (an encoder of 12 layers, width 768, with its embedding of
30,522 words, sequences of 64). Links: "loopback", or Mbit/s between network namespaces, one a rank (lab.py, root). A
rank is a process with one thread; the batch is a rank's, so more ranks are more samples (weak scaling). Each turn
builds its way anew, takes one step to warm up, then --steps that count; the ways alternate for --rounds. SGD without
momentum.

samples/s counts all ranks; CPU s a sample is the processor time of all ranks, all threads, over all samples: on a
machine that others use too, read that, and the ratios to DDP. "alone" is the step without any communication: speed
against it is the weak scaling. A model's rows on so many ranks over one link are printed as soon as they are known.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lab import Lab, missing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import plsc
from plsc.comm import Communicator, connect
from plsc.strategies import Reducer

Turn = Callable[[], None]
WAYS = ("alone", "DDP", "FSDP2", "Reducer fp32", "Reducer bf16", "Reducer 2 lanes")
BERT_WORDS, BERT_LENGTH = 30_522, 64


class Encoder(nn.Module):
    """An encoder of BERT's shape: words, positions, blocks before whose parts the rows are normalised."""

    def __init__(self, *, width: int, layers: int, heads: int, words: int = BERT_WORDS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:  # [B, T] -> [B, width]
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)

    def recompute_blocks(self) -> list[nn.Module]:
        return list(self.blocks)


ENCODERS = {
    "bert_base": {"width": 768, "layers": 12, "heads": 12},
    "bert_large": {"width": 1024, "layers": 24, "heads": 16},
    "bert_tiny": {"width": 128, "layers": 2, "heads": 2},
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Encoder(**ENCODERS[name]) if name in ENCODERS else plsc.models.build(name, 512, image_size=112)


def make_input(name: str, batch: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if name in ENCODERS:
        return torch.randint(0, BERT_WORDS, (batch, BERT_LENGTH), generator=generator)
    return torch.randn(batch, 3, 112, 112, generator=generator)


def blocks_of(net: nn.Module) -> list[nn.Module]:
    return net.recompute_blocks() if hasattr(net, "recompute_blocks") else []  # type: ignore[operator]


def build(way: str, model: nn.Module, comm: Communicator, x: Tensor) -> Turn:
    """One training step, in the way that is asked for."""
    net: nn.Module = copy.deepcopy(model)
    reducer: Reducer | None = None
    if way == "DDP":
        net = DistributedDataParallel(net)
    elif way == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (comm.world_size,))
        for block in blocks_of(net):
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif way != "alone":
        dtype, lanes = ("bf16" if "bf16" in way else "fp32"), (2 if "lanes" in way else 1)
        reducer = Reducer(net.parameters(), comm, reduce_dtype=dtype, lanes=lanes)
    optimizer = torch.optim.SGD(net.parameters(), 1e-5)

    def turn() -> None:
        net(x).square().mean().backward()
        if reducer is not None:
            reducer.finish()
        optimizer.step()
        if reducer is not None:
            reducer.zero_grad()
        else:
            optimizer.zero_grad()

    return turn


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    comm = connect("gloo", timeout=1800.0)
    model, x = make(args.model), make_input(args.model, args.batch_size, comm.rank)
    seconds: dict[str, list[float]] = {way: [] for way in args.ways}
    cpu: dict[str, list[float]] = {way: [] for way in args.ways}
    for _ in range(args.rounds):
        for way in args.ways:
            turn = build(way, model, comm, x)
            turn()
            comm.barrier()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(args.steps):
                turn()
            busy = time.process_time() - busy
            comm.barrier()
            seconds[way].append((time.perf_counter() - start) / args.steps)
            cpu[way].append(sum(comm.gather_objects(busy)) / args.steps)
            del turn
            gc.collect()
    if comm.rank == 0:
        Path(args.result).write_text(json.dumps({"seconds": seconds, "cpu": cpu}))
    comm.close()


def measure(args: argparse.Namespace, model: str, ranks: int, link: str) -> dict[str, Any]:
    """Starts the ranks and waits for what they have measured."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="plsc-models-"))
        words = [sys.executable, __file__, "--worker", "--model", model, "--result", f"{folder}/result.json"]
        words += ["--rounds", str(args.rounds), "--steps", str(args.steps), "--batch-size", str(args.batch_size)]
        words += ["--ways", *args.ways]
        env = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        started: list[subprocess.Popen[Any]] = []
        if link == "loopback":
            env["GLOO_SOCKET_IFNAME"] = "lo"
            for rank in range(ranks):
                started.append(subprocess.Popen(words, env={**os.environ, **env, "RANK": str(rank)}))
                stack.callback(started[-1].kill)
        else:
            lab = stack.enter_context(Lab(ranks, mbit=float(link)))
            env["MASTER_ADDR"] = lab.addresses[0]
            started = [lab.start(rank, words, {**env, "RANK": str(rank)}) for rank in range(ranks)]
        for process in started:
            if process.wait():
                sys.exit(f"a rank of {model} on {ranks} ranks failed with {process.returncode}")
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
        return result


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def report(args: argparse.Namespace, result: dict[str, Any], model: str, ranks: int, link: str) -> None:
    samples = args.batch_size * ranks
    ddp = statistics.median(result["seconds"].get("DDP", [1.0]))
    ddp_cpu = statistics.median(result["cpu"].get("DDP", [1.0]))
    alone = statistics.median(result["seconds"].get("alone", [0.0]))
    for way in args.ways:
        times, busy = result["seconds"][way], statistics.median(result["cpu"][way])
        middle = statistics.median(times)
        spread = f"{samples / max(times):.2f}-{samples / min(times):.2f}"
        cells = [model, str(ranks), link, way, f"{samples / middle:.2f}", spread, f"{busy / samples:.3f}"]
        print(f"| {' | '.join(cells)} | {alone / middle:.3f} | {ddp / middle:.3f} | {busy / ddp_cpu:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="training steps of known models: Reducer, DDP, FSDP2")
    parser.add_argument("--models", nargs="+", default=["iresnet50", "vit_base", "bert_base"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["loopback", "1000"], help="loopback, or Mbit/s")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--batch-size", type=int, default=4, help="of one rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="bert_tiny and mobilefacenet, two ranks, loopback")
    for name in ("--model", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    if args.quick:
        args.models, args.ranks, args.links, args.rounds = ["bert_tiny", "mobilefacenet"], [2], ["loopback"], 2
    print(f"batch {args.batch_size} a rank, {args.rounds} rounds of {args.steps} steps, torch {torch.__version__}\n")
    columns = ["model", "ranks", "link", "", "samples/s", "range", "CPU s a sample", "/ alone", "/ DDP", "CPU / DDP"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for model in args.models:
        for ranks in args.ranks:
            for link in args.links:
                if link != "loopback" and (why := missing()) is not None:
                    print(f"skipped {model}, {ranks} ranks, {link} Mbit/s: {why}")
                    continue
                report(args, measure(args, model, ranks, link), model, ranks, link)


if __name__ == "__main__":
    main()
