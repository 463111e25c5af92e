"""Measures ways of training together over slow links: time and bytes of a step, between network namespaces as hosts.

    python benchmarks/network.py                 # all tables and network.png; about 10 minutes
    python benchmarks/network.py --quick         # the first table with fewer rounds; about a minute
    python benchmarks/network.py --tables hosts  # four hosts of one rank, without the other tables

Needs root (see lab.py); elsewhere it says so and ends. Each rank is a process with one thread. Tables:

    hosts       four hosts of one rank, 100 Mbit/s: DDP, the Reducer, half types, DGC, local SGD, and the step without
                any communication, in turn in one run; batch and model are the same for all
    topologies  two hosts of two ranks: sums that travel flat, flat with ranks that alternate between hosts, by hosts
    head        the class-parallel head on one, two and four hosts with as many classes a host, and with four times
                as many
    bandwidth   the first table's step times at 10, 100 and 1000 Mbit/s, and network.png

A step of local SGD is an eighth of eight, one meeting included. `MB sent` is what a host's interface sent, headers and
signs of life included; `MB counted` what the verbs were given (plsc.comm.Counting), as a ring sends it. Communication
is the step less the step without any, `CPU ms` a rank's processor time with all its threads. Ratios
are medians over medians.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lab import Lab, missing, sent_bytes
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import plsc
from plsc.comm import Communicator, Counting, Hierarchical, connect
from plsc.strategies import DGC, DGCOptions, LocalSGD, LocalSGDOptions, Reducer

Turn = Callable[[], None]
Result = dict[str, dict[str, Any]]  # by technique: seconds of a step by round, bytes of a step sent and counted
BANDWIDTHS = (10.0, 100.0, 1000.0)
WANTED = {  # of DDP in the same run, at most: step time (0.05 are noise where both fill the link), bytes, communication
    "Reducer fp32": (1.05, None, None),
    "Reducer bf16": (None, 0.55, 0.55),
    "Reducer fp16": (None, 0.55, 0.55),
    "DGC 0.1 %": (0.2, 0.02, None),
    "local SGD 8": (0.25, None, None),
    "local SGD 8, bf16": (0.15, None, None),
}


# ---- what is measured, on a rank


def make_model(width: int) -> nn.Module:
    """2.4 million parameters at width 1024, as in networks of a few large layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1000))


def techniques(comm: Communicator, args: argparse.Namespace) -> dict[str, tuple[Turn, int, Counting]]:
    """By name: one step, how many steps make a whole turn, and what counts its bytes."""
    model = make_model(args.width)
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(args.batch_size, 256, generator=generator)
    y = torch.randint(0, 1000, (args.batch_size,), generator=generator)
    made: dict[str, tuple[Turn, int, Counting]] = {}

    def add(name: str, build: Callable[[nn.Module, torch.optim.SGD, Counting], Turn], steps: int = 1) -> None:
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), 0.01, momentum=0.9)
        counting = Counting(comm)
        made[name] = build(own, optimizer, counting), steps, counting

    def backward(net: nn.Module) -> None:
        F.cross_entropy(net(x), y).backward()

    def no_communication(net: nn.Module, optimizer: torch.optim.SGD, _: Counting) -> Turn:
        def turn() -> None:
            backward(net)
            optimizer.step()
            optimizer.zero_grad()

        return turn

    def ddp(net: nn.Module, optimizer: torch.optim.SGD, _: Counting) -> Turn:
        return no_communication(DistributedDataParallel(net), optimizer, _)

    def reducer(dtype: str, topology: Callable[[Communicator], Communicator] = lambda inner: inner) -> Any:
        def build(net: nn.Module, optimizer: torch.optim.SGD, counting: Counting) -> Turn:
            averaging = Reducer(net.parameters(), topology(counting), reduce_dtype=dtype)

            def turn() -> None:
                backward(net)
                averaging.finish()
                optimizer.step()
                averaging.zero_grad()

            return turn

        return build

    def dgc(net: nn.Module, optimizer: torch.optim.SGD, counting: Counting) -> Turn:
        compressed = DGC(net.parameters(), counting, options=DGCOptions(density=0.001))

        def turn() -> None:
            backward(net)
            compressed.step(optimizer)

        return turn

    def local(dtype: str) -> Any:
        def build(net: nn.Module, optimizer: torch.optim.SGD, counting: Counting) -> Turn:
            local_sgd = LocalSGD(net, counting, options=LocalSGDOptions(every=8), reduce_dtype=dtype)

            def turn() -> None:
                local_sgd.begin_step()
                backward(net)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.end_step(optimizer)

            return turn

        return build

    if args.table == "topologies":
        add("flat", reducer("fp32"))
        add("flat, hosts alternate", reducer("fp32", lambda inner: inner.split([[0, 2, 1, 3]])))
        add("by hosts", reducer("fp32", lambda inner: Hierarchical(inner, hosts=2)))
        add("by hosts, bf16", reducer("bf16", lambda inner: Hierarchical(inner, hosts=2)))
    else:
        add("no communication", no_communication, 2)
        add("DDP", ddp)
        add("Reducer fp32", reducer("fp32"))
        add("Reducer bf16", reducer("bf16"))
        add("Reducer fp16", reducer("fp16"))
        add("DGC 0.1 %", dgc, 4)
        add("local SGD 8", local("fp32"), 8)
        add("local SGD 8, bf16", local("bf16"), 8)
    return made


def heads(comm: Communicator, args: argparse.Namespace) -> dict[str, tuple[Turn, int, Counting]]:
    """The head's forward and backward with a rank's share of classes, and with four times that share."""
    made: dict[str, tuple[Turn, int, Counting]] = {}
    generator = torch.Generator().manual_seed(comm.rank)
    for share in (args.classes, 4 * args.classes):
        counting, classes = Counting(comm), share * comm.world_size
        head = plsc.ClassParallelHead(args.dim, classes, comm=counting, head_optimizer=plsc.SGD(0.01, momentum=0.9))
        embeddings = torch.randn(args.batch_size, args.dim, generator=generator).requires_grad_()
        labels = torch.randint(0, classes, (args.batch_size,), generator=generator)

        def turn(head: nn.Module = head, embeddings: torch.Tensor = embeddings, labels: torch.Tensor = labels) -> None:
            embeddings.grad = None
            head(embeddings, labels).backward()

        made[f"{share:,} classes a host"] = turn, 2, counting
    return made


def work(args: argparse.Namespace) -> None:
    """One rank: every technique in turn, `rounds` times after one that warms up."""
    torch.set_num_threads(1)
    comm = connect("gloo", timeout=300.0)
    turns = heads(comm, args) if args.table == "head" else techniques(comm, args)
    device = "eth0"
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    sent: dict[str, list[float]] = {name: [] for name in turns}
    cpu: dict[str, list[float]] = {name: [] for name in turns}
    counted: dict[str, float] = {}
    for number in range(args.rounds + 1):
        for name, (turn, steps, counting) in turns.items():
            counting.reset()
            comm.barrier()
            start, before, busy = time.perf_counter(), sent_bytes(device), time.process_time()
            for _ in range(steps):
                turn()
            busy = time.process_time() - busy
            comm.barrier()
            if number:
                seconds[name].append((time.perf_counter() - start) / steps)
                sent[name].append((sent_bytes(device) - before) / steps)
                cpu[name].append(busy / steps)
            counted[name] = as_a_ring_sends(counting, comm.world_size) / steps
    everybody, busy_all = comm.gather_objects(sent), comm.gather_objects(cpu)
    if comm.rank == 0:
        result: Result = {
            name: {
                "seconds": seconds[name],
                "sent": max(statistics.median(each[name]) for each in everybody),
                "counted": counted[name],
                "cpu": statistics.median(
                    [statistics.mean(each) for each in zip(*(each[name] for each in busy_all), strict=True)]
                ),
            }
            for name in turns
        }
        Path(args.result).write_text(json.dumps(result))
    comm.close()


def as_a_ring_sends(counting: Counting, world: int) -> float:
    """Bytes a rank sends for what it gave to the verbs."""
    factor = {"all_reduce": 2 * (world - 1) / world, "all_gather": world - 1.0}
    return sum(factor.get(verb, (world - 1) / world) * size for verb, size in counting.bytes.items())


# ---- the runs and their tables


def measure(args: argparse.Namespace, table: str, *, hosts: int, ranks: int, mbit: float, rounds: int) -> Result:
    """Starts the ranks of one lab and waits for what they have measured."""
    with Lab(hosts, mbit=mbit) as lab, tempfile.TemporaryDirectory(prefix="plsc-network-") as folder:
        place = Path(folder) / "result.json"
        words = [sys.executable, __file__, "--worker", "--table", table, "--rounds", str(rounds)]
        words += ["--result", str(place)]
        for name in ("width", "batch_size", "classes", "dim"):
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        shared = {"WORLD_SIZE": str(hosts * ranks), "OMP_NUM_THREADS": "1"}
        shared |= {"MASTER_ADDR": lab.addresses[0], "MASTER_PORT": "29400"}
        started = [
            lab.start(rank // ranks, words, shared | {"RANK": str(rank), "GROUP_RANK": str(rank // ranks)})
            for rank in range(hosts * ranks)
        ]
        for process in started:
            if process.wait():
                sys.exit(f"a rank of table {table} failed with {process.returncode}")
        result: Result = json.loads(place.read_text())
        return result


def median(row: dict[str, Any]) -> float:
    return statistics.median(row["seconds"])


def cells(row: dict[str, Any]) -> list[str]:
    times = [1e3 * each for each in row["seconds"]]
    return [
        f"{statistics.median(times):.1f}",
        f"{min(times):.1f}-{max(times):.1f}",
        f"{row['sent'] / 1e6:.3f}",
        f"{row['counted'] / 1e6:.3f}",
    ]


def print_rows(first: str, rows: list[list[str]], columns: list[str]) -> None:
    print(f"\n| {first} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    sys.stdout.flush()


def report_hosts(result: Result, mbit: float) -> list[str]:
    """Prints the table; what misses the wanted ratios."""
    ddp, alone = result["DDP"], median(result["no communication"])
    rows, missed = [], []
    for name, row in result.items():
        ratio = [median(row) / median(ddp), row["sent"] / ddp["sent"], (median(row) - alone) / (median(ddp) - alone)]
        rows.append([name, *cells(row), f"{1e3 * row['cpu']:.0f}", *(f"{each:.3f}" for each in ratio)])
        for got, wanted, what in zip(ratio, WANTED.get(name, ()), ("step", "bytes", "communication"), strict=False):
            if wanted is not None and got > wanted:
                missed.append(f"{name}: {what} {got:.3f} of DDP's, wanted at most {wanted}")
    print_rows(
        f"4 hosts of 1 rank, {mbit:g} Mbit/s",
        rows,
        ["step ms", "range", "MB sent", "MB counted", "CPU ms", "step / DDP", "bytes / DDP", "communication / DDP"],
    )
    return missed


def report_topologies(result: Result, mbit: float) -> list[str]:
    flat, hosts = result["flat"], result["by hosts"]
    rows = []
    for name, row in result.items():
        steps, spread, sent, _ = cells(row)  # what is counted would mix the verbs inside a host with those between
        ratios = [f"{median(row) / median(flat):.3f}", f"{row['sent'] / flat['sent']:.3f}"]
        rows.append([name, steps, spread, sent, *ratios])
    columns = ["step ms", "range", "MB sent", "step / flat", "bytes / flat"]
    print_rows(f"2 hosts of 2 ranks, {mbit:g} Mbit/s", rows, columns)
    missed = []
    for name, wanted in (("flat", 0.7), ("flat, hosts alternate", 0.35)):
        if (got := hosts["sent"] / result[name]["sent"]) > wanted:
            missed.append(f"by hosts: bytes {got:.3f} of {name}, wanted at most {wanted}")
    return missed


def report_heads(results: dict[int, Result]) -> list[str]:
    rows, missed = [], []
    for hosts, result in results.items():
        few, many = result.values()
        rows += [[str(hosts), name, *cells(row)] for name, row in result.items()]
        if hosts > 1 and abs(many["counted"] - few["counted"]) > 0.001 * few["counted"]:
            missed.append(f"head: {many['counted']:.0f} bytes with four times the classes, {few['counted']:.0f} before")
    print_rows("hosts", rows, ["", "step ms", "range", "MB sent", "MB counted"])
    return missed


def draw(results: dict[float, Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.8), dpi=130)
    for name in next(iter(results.values())):
        times = [1e3 * median(result[name]) for result in results.values()]
        axes.plot(list(results), times, "k--" if name == "no communication" else "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel="step, ms", title="4 hosts of 1 rank")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    print(f"\nwritten: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="training over slow links, between network namespaces")
    parser.add_argument("--tables", nargs="+", default=["hosts", "topologies", "head", "bandwidth"])
    parser.add_argument("--quick", action="store_true", help="the first table with two rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--width", type=int, default=1024, help="of the model's hidden layers")
    parser.add_argument("--batch-size", type=int, default=16, help="of one rank")
    parser.add_argument("--classes", type=int, default=5000, help="of one host, in the table head")
    parser.add_argument("--dim", type=int, default=128, help="of embeddings, in the table head")
    parser.add_argument("--plot", default=str(Path(__file__).with_name("network.png")))
    parser.add_argument("--json", help="write all measurements here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--table", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    if (why := missing()) is not None:
        print(f"skipped: {why}")
        return
    if args.quick:
        args.tables, args.rounds = ["hosts"], 2
    parameters = sum(param.numel() for param in make_model(args.width).parameters())
    what = f"{parameters / 1e6:.2f} M parameters, batch {args.batch_size} a rank, {args.rounds} rounds"
    print(f"{what}, torch {torch.__version__}", flush=True)
    run_tables(args)


def run_tables(args: argparse.Namespace) -> None:
    missed: list[str] = []
    by_bandwidth: dict[float, Result] = {}
    everything: dict[str, Any] = {}
    if "hosts" in args.tables:
        result = measure(args, "hosts", hosts=4, ranks=1, mbit=args.mbit, rounds=args.rounds)
        by_bandwidth[args.mbit] = everything["hosts"] = result
        missed += report_hosts(result, args.mbit)
    if "topologies" in args.tables:
        result = measure(args, "topologies", hosts=2, ranks=2, mbit=args.mbit, rounds=args.rounds)
        everything["topologies"] = result
        missed += report_topologies(result, args.mbit)
    if "head" in args.tables:
        heads_by_hosts = {
            hosts: measure(args, "head", hosts=hosts, ranks=1, mbit=args.mbit, rounds=args.rounds)
            for hosts in (1, 2, 4)
        }
        everything["head"] = heads_by_hosts
        missed += report_heads(heads_by_hosts)
    if "bandwidth" in args.tables:
        for mbit in BANDWIDTHS:
            if mbit not in by_bandwidth:
                rounds = 1 if mbit < 50 else args.rounds
                by_bandwidth[mbit] = measure(args, "hosts", hosts=4, ranks=1, mbit=mbit, rounds=rounds)
                report_hosts(by_bandwidth[mbit], mbit)
        everything["bandwidth"] = by_bandwidth
        draw(dict(sorted(by_bandwidth.items())), Path(args.plot))
    if args.json:
        Path(args.json).write_text(json.dumps(everything, indent=1))
    print("\n" + ("\n".join(missed) if missed else "every wanted ratio is reached"))


if __name__ == "__main__":
    main()
