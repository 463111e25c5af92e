"""Checks the model of a step (plsc.train.scaling) against ranks on this machine, and predicts larger ones with it.

    python benchmarks/scaling.py                # 1, 2 and 4 gloo ranks of one thread each: five minutes on two cores
    python benchmarks/scaling.py --quick        # fewer classes, fewer rounds: a minute
    python benchmarks/scaling.py --predict      # V100 and H200, 8 to 128 of them; computes, measures nothing

The check: constants are measured by one process alone and by as many at once as there are cores, as `plsc-train --plan`
measures them; alpha and beta by two gloo ranks. A step (backbone, fused ArcFace head, Fleet.step) is then predicted and
taken. What more ranks than cores do is predicted from the cores' constants: each core does the work of several ranks.
Wall is that of the slowest rank, links included. Processor time is a rank's own, predicted without links, and means the
same on a machine that is busy otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from plsc.comm import Communicator, connect
from plsc.fleet import Fleet
from plsc.nn.class_parallel import block_rows
from plsc.train import build, plan, speeds
from plsc.train.config import Config, DataConfig, HeadConfig, ModelConfig, OptimConfig, load_recipe
from plsc.train.launch import num_cores
from plsc.train.scaling import GB, Device, Links, Seconds, Work, cached_share, step_seconds
from plsc.train.speeds import Backbone

DIM, BATCH = 512, 64
MESSAGE = 4 << 20  # bytes that tell beta
# For 112 pixels under amp="bf16", as plsc.train.speeds.measure_backbone finds it on a CPU.
IRESNET50 = Backbone(0.0, 0.0, 0.0, bytes_an_image=43.7e6, num_weights=43_590_848, flops=12.62e9)


def config(classes: int, world: int) -> Config:
    return Config(
        batch_size=BATCH * world,
        data=DataConfig(kind="synthetic", image_size=48, channels=1, num_classes=classes),
        model=ModelConfig(backbone="smallconv", embedding_size=DIM),
        head=HeadConfig(fused=True),
        optim=OptimConfig(lr=1e-3),
    )


# ---- one rank


def one_rank(rank: int, world: int, args: argparse.Namespace, target: str) -> None:
    """Measures constants while all ranks do, then takes steps; rank 0 writes down both."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    torch.set_num_threads(1)
    comm = connect("gloo")
    found: dict[str, Any] = {"steps": {}}
    asked = config(args.classes[0], world)
    if world <= num_cores():
        comm.barrier()
        found["device"] = asdict(speeds.measure_head(asked, BATCH * world, torch.device("cpu")))
        comm.barrier()
        found["backbone"] = asdict(speeds.measure_backbone(asked, BATCH))
        found["links"] = measure_links(comm)
    for classes in args.classes:
        found["steps"][classes] = take_steps(config(classes, world), comm, args.rounds)
    everyone = comm.gather_objects(found)
    if rank == 0:
        Path(target).write_text(json.dumps(everyone))
    comm.close()


def measure_links(comm: Communicator) -> dict[str, float]:
    """alpha and beta as this backend's collectives have them."""
    if comm.world_size == 1:
        return {"latency": 0.0, "rate": 1e12}
    small, large = torch.zeros(2), torch.zeros(MESSAGE // 4)

    def run(tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: comm.all_gather(tensor).wait()

    hops = comm.world_size - 1
    alpha = wall(run(small)) / hops
    return {"latency": alpha, "rate": MESSAGE / max(wall(run(large)) / hops - alpha, 1e-6)}


def wall(run: Callable[[], object]) -> float:
    """Seconds of the quickest of twenty: ranks wait for each other, so processor time says nothing."""
    found = []
    for _ in range(20):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def take_steps(asked: Config, comm: Communicator, rounds: int) -> dict[str, float]:
    """Seconds and processor seconds of a step, the quickest of some."""
    fleet = Fleet(asked.strategy, comm)
    torch.manual_seed(0)
    backbone = fleet.replicate(build.build_backbone(asked))
    head = build.build_head(asked, asked.data.num_classes, comm)
    optimizer = build.build_optim(asked, backbone, head)
    images = torch.randn(BATCH, 1, 48, 48)
    labels = torch.randint(0, asked.data.num_classes, (BATCH,), generator=torch.Generator().manual_seed(comm.rank))
    walls, cpus = [], []
    for _ in range(rounds + 1):
        comm.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        fleet.step(head(backbone(images), labels), optimizer)
        cpus.append(time.process_time() - cpu)
        comm.barrier()
        walls.append(time.perf_counter() - begin)
    return {"wall": min(walls[1:]), "cpu": min(cpus[1:])}


# ---- the check


def run_world(world: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank of a world found."""
    args.port += 1
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "found.json")
        mp.spawn(one_rank, (world, args, target), nprocs=world)
        found: list[dict[str, Any]] = json.loads(Path(target).read_text())
    return found


def mean(tables: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(table[name] for table in tables) for name in tables[0]}


def predicted(
    classes: int, world: int, device: Device, links: Links, backbone: Backbone, *, sharing: float = 1.0
) -> Seconds:
    """A step; sharing: ranks a core."""
    asked, num_samples = config(classes, world), BATCH * world
    share = cached_share(
        num_samples=num_samples,
        num_rows=-(-classes // world),
        block=block_rows(num_samples, DIM),
        centers=1,
        cache_bytes=int(asked.head.cache_mb * 2**20),
        half=False,
    )
    work = Work(classes, DIM, BATCH, world, backbone_bytes=4 * backbone.num_weights, cached=share)
    slow = replace(links, latency=links.latency * sharing, rate=links.rate / sharing)
    return step_seconds(work, device.slowed(sharing), slow, backbone=backbone.seconds_of(BATCH) * sharing)


def check(args: argparse.Namespace) -> None:
    cores = num_cores()
    found = {world: run_world(world, args) for world in args.ranks}
    for world in found:
        if "device" in found[world][0]:
            told = mean([rank["device"] for rank in found[world]])
            links, body = mean([rank["links"] for rank in found[world]]), mean([r["backbone"] for r in found[world]])
            print(
                f"{world} at once: products {told['flops'] / 1e9:.1f} GF/s, {told['entry'] * 1e9:.2f} ns a cosine, "
                f"{told['read'] * 1e9:.3f} ns a number read, {told['step'] * 1e9:.3f} ns a number stepped, backbone "
                f"{body['seconds'] * 1e3:.1f} ms + {body['seconds_an_image'] * 1e3:.2f} ms an image"
            )
            if world > 1:
                print(f"links: alpha {links['latency'] * 1e6:.0f} us, beta {links['rate'] / 1e6:.0f} MB/s")
    print(f"\nB = {BATCH} a rank, D = {DIM}, {cores} cores, one thread a rank\n")
    print("| ranks | classes | wall s | predicted | ratio | CPU s a rank | predicted | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for world in found:
        base = max(each for each in found if each <= min(world, cores))
        device = Device(**mean([rank["device"] for rank in found[base]]))
        body = Backbone(**mean([rank["backbone"] for rank in found[base]]))
        links = Links(**mean([rank["links"] for rank in found[base]]))
        for classes in args.classes:
            took = [rank["steps"][str(classes)] for rank in found[world]]
            walls, cpu = max(rank["wall"] for rank in took), statistics.mean(rank["cpu"] for rank in took)
            by_wall = predicted(classes, world, device, links, body, sharing=max(1.0, world / cores)).total
            once = predicted(classes, world, device, links, body)
            by_cpu = once.backbone + once.head
            cells = [f"{walls:.3f} | {by_wall:.3f} | {by_wall / walls:.2f}", f"{cpu:.3f} | {by_cpu:.3f}"]
            print(f"| {world} | {classes:,} | {' | '.join(cells)} | {by_cpu / cpu:.2f} |", flush=True)


# ---- predictions


def predict() -> None:
    """Tables for devices that are not here, by the constants of plsc.train.scaling.HARDWARE."""
    print("128 samples a GPU, iresnet50, D = 512, split weight and bfloat16 momentum: PREDICTED, not measured\n")
    print("| GPUs | classes | ms a step | backbone | head | links | efficiency | at worst | GB a GPU |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in ("V100", "H200", "H200TF32", "H200BF16"):
        for classes in (10_000_000, 50_000_000):
            first = 0.0
            for num in (8, 32, 128):
                head = HeadConfig(fused=True, weight_dtype="split", state_dtype="bf16")
                row, worst = row_of(f"{num}x{name}", classes, head), row_of(f"{num}x{name}", classes, head, worst=4.0)
                took, first = row.seconds, first or row.seconds.total
                parts = " | ".join(f"{1e3 * part:.1f}" for part in (took.total, took.backbone, took.head, took.links))
                told = f"{first / took.total:.2f} | {first / worst.seconds.total:.2f} | {row.num_bytes / GB:.1f}"
                print(f"| {num} x {name} | {classes // 10**6} M | {parts} | {told} |")
    print("\nMillions of classes that fit beside it\n")
    places = ("8xV100", "1xH200", "8xH200")
    print(f"| head | sample | bytes a class | {' | '.join(places)} |\n|---|---|---|{'---|' * len(places)}")
    for rate in (1.0, 0.1):
        for fused, weight, state in plan.FORMATS:
            if fused or rate == 1.0:
                head = HeadConfig(fused=fused, weight_dtype=weight, state_dtype=state, sample_rate=rate)
                rows = [row_of(place, 1_000_000, head) for place in places]
                told = " | ".join(f"{row.fitting / 1e6:.0f}" for row in rows)
                print(f"| {plan.words_of(head)} | {rate:g} | {rows[0].bytes_per_class:.0f} | {told} |")


def row_of(place: str, classes: int, head: HeadConfig, *, worst: float = 0.0) -> plan.Row:
    """The plan's row; worst: links so many times slower, and nothing hidden behind computation."""
    asked = load_recipe("ms1mv3")
    num = int(place.partition("x")[0])
    asked = replace(asked, plan=place, batch_size=128 * num, head=head, data=replace(asked.data, num_classes=classes))
    target = plan.read_target(asked)
    links, device = target.links, target.device
    assert device is not None
    if worst:
        slow = replace(
            links,
            latency=links.latency * worst,
            rate=links.rate / worst,
            latency_inside=links.latency_inside * worst,
            rate_inside=links.rate_inside / worst,
        )
        target, device = replace(target, links=slow), replace(device, overlaps=False)
    return plan.row_of(asked, classes, target, IRESNET50, device)


def main() -> None:
    parser = argparse.ArgumentParser(description="the model of a step against ranks here, and its predictions")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--classes", type=int, nargs="+", help="default: 20000 100000")
    parser.add_argument("--rounds", type=int, help="steps of each (default: 8)")
    parser.add_argument("--port", type=int, default=29731)
    parser.add_argument("--quick", action="store_true", help="5,000 classes, 3 rounds")
    parser.add_argument("--predict", action="store_true", help="print the tables of larger machines, and end")
    args = parser.parse_args()
    args.classes = args.classes or ([5_000] if args.quick else [20_000, 100_000])
    args.rounds = args.rounds or (3 if args.quick else 8)
    predict() if args.predict else check(args)


if __name__ == "__main__":
    main()
