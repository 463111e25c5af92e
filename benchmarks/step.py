"""Compares a whole training step with its backbone and its head alone: what the machinery around them costs.

    python benchmarks/step.py                        # mobilefacenet at 112 pixels, 10,000 classes, two gloo ranks
    python benchmarks/step.py --fused                # the head's rows are updated inside its backward
    python benchmarks/step.py --model iresnet18 --batch-size 16

One process a rank with one thread each; batch size is a rank's. The input is in memory, no loader runs. In turn:

    backbone    forward and backward alone, no communication
    head        forward and backward alone, its own collectives included
    optimizer   torch.optim.SGD over the parameters that have gradients
    Fleet       the whole step: backbone, head, Fleet.step (loss check, averaging over ranks, optimizer, zeroing)
    DDP         the same with torch's DistributedDataParallel around the backbone and a loop of one's own

Each turn begins and ends with a barrier, so its wall time is that of the slower rank; processor time is the mean over
ranks, and on a machine that others use too the better judge. Medians over the rounds.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import plsc
from plsc.comm import Communicator, connect

Turn = Callable[[], None]


def turns(args: argparse.Namespace, comm: Communicator) -> dict[str, Turn]:
    """Everything that is timed, by name."""
    torch.manual_seed(comm.rank)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(0, args.classes, (args.batch_size,))
    model = plsc.models.MODELS[args.model](args.dim, image_size=args.image_size)
    fleet = plsc.Fleet(plsc.Strategy(), comm)
    alone, in_ddp, in_fleet = model, DistributedDataParallel(copy.deepcopy(model)), fleet.replicate(copy.deepcopy(model))
    heads = [make_head(args, comm) for _ in range(3)]
    embeddings = alone(images).detach().requires_grad_()
    upstream = torch.randn_like(embeddings) * 1e-3

    def backbone() -> None:
        alone.zero_grad()
        alone(images).backward(upstream)

    def head() -> None:
        heads[0].weight.grad = embeddings.grad = None
        heads[0](embeddings, labels).backward()

    parts = sgd(alone, heads[0])
    backbone()
    head()

    of_fleet = sgd(in_fleet, heads[1])

    def whole() -> None:
        with fleet.autocast():
            loss = heads[1](in_fleet(images), labels)
        fleet.step(loss, of_fleet)

    of_ddp = sgd(in_ddp, heads[2])

    def ddp() -> None:
        loss = heads[2](in_ddp(images), labels)
        of_ddp.zero_grad()
        loss.backward()
        of_ddp.step()

    return {"backbone": backbone, "head": head, "optimizer": lambda: parts.step() and None, "Fleet": whole, "DDP": ddp}


def make_head(args: argparse.Namespace, comm: Communicator) -> plsc.ClassParallelHead:
    optimizer = plsc.SGD(1e-3, momentum=0.9) if args.fused else None
    return plsc.ClassParallelHead(args.dim, args.classes, comm=comm, head_optimizer=optimizer)


def sgd(backbone: torch.nn.Module, head: plsc.ClassParallelHead) -> torch.optim.SGD:
    cut = [] if head.head_optimizer is not None else [head.weight]
    return torch.optim.SGD([*backbone.parameters(), *cut], 1e-3, momentum=0.9)


def one_rank(rank: int, args: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    torch.set_num_threads(1)
    comm = connect("gloo")
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    all_turns = turns(args, comm)
    for number in range(args.rounds + 2):
        for name, turn in all_turns.items():
            comm.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            turn()
            used = time.process_time() - start_cpu
            comm.barrier()
            took = time.perf_counter() - start
            if number >= 2:  # the first two are a warm-up
                wall.setdefault(name, []).append(took)
                cpu.setdefault(name, []).append(statistics.mean(comm.gather_objects(used)))
    if rank == 0:
        report(args, wall, cpu)
    comm.close()


def report(args: argparse.Namespace, wall: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
    print(f"{args.model}, {args.image_size} px, {args.classes:,} classes, D={args.dim}, {args.ranks} ranks of one thread, "
          f"{args.batch_size} samples each, torch {torch.__version__}\n")
    print("| | wall ms | range | CPU ms | outside backbone and head, wall | CPU | without the optimizer, CPU |")
    print("|---|---|---|---|---|---|---|")
    of_wall, of_cpu = ({name: statistics.median(times) for name, times in kind.items()} for kind in (wall, cpu))
    for name, times in wall.items():
        line = f"| {name} | {of_wall[name] * 1e3:.0f} | {min(times) * 1e3:.0f}-{max(times) * 1e3:.0f} | {of_cpu[name] * 1e3:.1f}"
        if name in ("Fleet", "DDP"):
            outside = [1 - (kind["backbone"] + kind["head"]) / kind[name] for kind in (of_wall, of_cpu)]
            line += f" | {outside[0]:.1%} | {outside[1]:.1%} | {outside[1] - of_cpu['optimizer'] / of_cpu[name]:.1%} |"
        else:
            line += " | | | |"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description="a whole training step against its backbone and head alone")
    parser.add_argument("--model", default="mobilefacenet", choices=sorted(plsc.models.MODELS))
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--classes", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--port", type=int, default=29532)
    parser.add_argument("--fused", action="store_true", help="head_optimizer=plsc.SGD")
    args = parser.parse_args()
    mp.spawn(one_rank, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
