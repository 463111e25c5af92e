"""Measures what a training step costs beside its backbone and its head: averaging, checks, optimizer, zeroing.

    python benchmarks/step.py                        # mobilefacenet at 112 pixels, 10,000 classes, two gloo ranks
    python benchmarks/step.py --fused                # the head's rows are updated inside its backward
    python benchmarks/step.py --model iresnet18 --batch-size 16

One process a rank with one thread each; batch size is a rank's. The input is in memory, no loader runs. In turn:

    backbone         forward and backward alone, no communication
    head             forward and backward alone, its own collectives included
    hollow           forward and backward of a stand-in: it has the backbone's parameters and gives each a gradient,
                     without the arithmetic
    optimizer        torch.optim.SGD over the parameters that have gradients
    Fleet            the whole step: backbone, head, Fleet.step
    DDP              the same with torch's DistributedDataParallel around the backbone and a loop of one's own
    Fleet, DDP of hollow   the same steps around the stand-in: what they cost beside head and hollow is the machinery

The machinery is a few percent of a step, less than the noise of a whole one on a machine that others use too; around
the stand-in it is most of the step. No backward hides its communication there: its wall time is an upper bound. Each
turn begins and ends with a barrier; wall time is that of the slower rank, processor time the mean over ranks with all
their threads.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import plsc
from plsc.comm import Communicator, connect

Turn = Callable[[], None]
SMALL = 5  # times a round for the turns without a backbone


class Hollow(nn.Module):
    """The parameters of a backbone, and an embedding that hands each of them a ready gradient."""

    def __init__(self, backbone: nn.Module, embedding: Tensor) -> None:
        super().__init__()
        self.embedding = embedding.detach()
        self.all = nn.ParameterList(copy.deepcopy(list(backbone.parameters())))
        self.grads = [torch.randn_like(param) * 1e-6 for param in self.all]

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = _Given.apply(self.embedding, self.grads, *self.all)
        return out


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedding: Tensor, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return embedding.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, *ctx.grads)


def turns(args: argparse.Namespace, comm: Communicator) -> dict[str, Turn]:
    """Everything that is timed, by name."""
    torch.manual_seed(comm.rank)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(0, args.classes, (args.batch_size,))
    backbone = plsc.models.MODELS[args.model](args.dim, image_size=args.image_size)
    head, embeddings = make_head(args, comm), backbone(images).detach().requires_grad_()
    hollow = Hollow(backbone, embeddings)
    optimizer = sgd(backbone, head)

    def head_alone() -> None:
        head.weight.grad = embeddings.grad = None
        head(embeddings, labels).backward()

    def optimizer_alone() -> None:
        optimizer.step()

    return {
        "backbone": alone(backbone, images),
        "Fleet": fleet_step(args, comm, copy.deepcopy(backbone), images, labels),
        "DDP": ddp_step(args, comm, copy.deepcopy(backbone), images, labels),
        "head": head_alone,
        "hollow": alone(hollow, images),
        "optimizer": optimizer_alone,
        "Fleet of hollow": fleet_step(args, comm, copy.deepcopy(hollow), images, labels),
        "DDP of hollow": ddp_step(args, comm, copy.deepcopy(hollow), images, labels),
    }


def alone(module: nn.Module, images: Tensor) -> Turn:
    upstream = torch.randn_like(module(images)) * 1e-3

    def turn() -> None:
        module.zero_grad()
        module(images).backward(upstream)

    return turn


def fleet_step(
    args: argparse.Namespace, comm: Communicator, backbone: nn.Module, images: Tensor, labels: Tensor
) -> Turn:
    fleet, head = plsc.Fleet(comm=comm), make_head(args, comm)
    backbone = fleet.replicate(backbone)
    optimizer = sgd(backbone, head)

    def turn() -> None:
        with fleet.autocast():
            loss = head(backbone(images), labels)
        fleet.step(loss, optimizer)

    return turn


def ddp_step(args: argparse.Namespace, comm: Communicator, backbone: nn.Module, images: Tensor, labels: Tensor) -> Turn:
    ddp, head = DistributedDataParallel(backbone), make_head(args, comm)
    optimizer = sgd(ddp, head)

    def turn() -> None:
        loss = head(ddp(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return turn


def make_head(args: argparse.Namespace, comm: Communicator) -> plsc.ClassParallelHead:
    optimizer = plsc.SGD(1e-3, momentum=0.9) if args.fused else None
    return plsc.ClassParallelHead(args.dim, args.classes, comm=comm, head_optimizer=optimizer)


def sgd(backbone: nn.Module, head: plsc.ClassParallelHead) -> torch.optim.SGD:
    cut = [] if head.head_optimizer is not None else [head.weight]
    return torch.optim.SGD([*backbone.parameters(), *cut], 1e-3, momentum=0.9)


def one_rank(rank: int, args: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    torch.set_num_threads(1)
    comm = connect("gloo")
    all_turns = turns(args, comm)
    order = [name for name in all_turns if name in ("backbone", "Fleet", "DDP")]
    order += [name for name in all_turns if name not in order] * SMALL
    wall: dict[str, list[float]] = {name: [] for name in all_turns}
    cpu: dict[str, list[float]] = {name: [] for name in all_turns}
    for number in range(args.rounds + 1):
        for name in order:
            comm.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            all_turns[name]()
            used = time.process_time() - start_cpu
            comm.barrier()
            took = time.perf_counter() - start
            if number:  # the first is a warm-up
                wall[name].append(took)
                cpu[name].append(statistics.mean(comm.gather_objects(used)))
    if rank == 0:
        report(args, wall, cpu)
    comm.close()


def report(args: argparse.Namespace, wall: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
    print(
        f"{args.model}, {args.image_size} px, {args.classes:,} classes, D={args.dim}, {args.ranks} ranks of one thread "
        f"with {args.batch_size} samples each, torch {torch.__version__}\n"
    )
    print("| | wall ms | range | CPU ms | range |\n|---|---|---|---|---|")
    for name in wall:
        cells = [name]
        for times in (wall[name], cpu[name]):
            cells += [f"{statistics.median(times) * 1e3:.1f}", f"{min(times) * 1e3:.1f}-{max(times) * 1e3:.1f}"]
        print(f"| {' | '.join(cells)} |")
    print("\n| machinery of | wall ms | share of a step | CPU ms | share | its optimizer |\n|---|---|---|---|---|---|")
    for name in ("Fleet", "DDP"):
        cells = [name]
        for kind in (wall, cpu):
            of = {key: statistics.median(times) for key, times in kind.items()}
            rest = of[f"{name} of hollow"] - of["head"] - of["hollow"]
            cells += [f"{rest * 1e3:.1f}", f"{rest / (rest + of['backbone'] + of['head']):.1%}"]
        print(f"| {' | '.join(cells)} | {statistics.median(cpu['optimizer']) * 1e3:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="a whole training step against its backbone and head alone")
    parser.add_argument("--model", default="mobilefacenet", choices=sorted(plsc.models.MODELS))
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--classes", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29532)
    parser.add_argument("--fused", action="store_true", help="head_optimizer=plsc.SGD")
    args = parser.parse_args()
    mp.spawn(one_rank, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
