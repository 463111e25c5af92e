"""Click prediction on one server beside PaddlePaddle 2.6.2's parameter server: samples a CPU-second of each.

    python3.11 -m venv paddle && paddle/bin/pip install paddlepaddle==2.6.2 "numpy<2" protobuf==4.25.8 setuptools
    python benchmarks/ps_paddle.py --paddle paddle/bin/python [--workers 1 2] [--steps 150] [--batch 512] [--rounds 3]

CTR-DNN: 26 slots of dim 10, 13 dense numbers, three layers of 400, one output. async: Adam for dense weights, which
Paddle has on its server and ours are summed over the workers each step; geo: SGD (Paddle's knows no other) and an
exchange of rows and dense weights every 100 steps. Ids are skewed over 100,000 a slot, clicks are drawn from a hidden
linear model. One server process, one thread a worker; the contenders take turns, and so does what bounds ours: the
dense layers and their optimizer alone, in torch. CPU-seconds are those of all processes from step 10 on, the server's
too; batches are made before. Losses, of the last 20 steps, are not of the same initial weights.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

IDS, SLOTS, DENSE, DIM, WIDTH = 100_000, 26, 13, 10, 400
WARM = 10  # steps before the clock starts
GEO = 100  # pushes between two exchanges


def batches(rank: int, count: int, size: int) -> Any:
    """(dense [B, 13], ids [B, 26], clicked [B, 1])"""
    random = np.random.default_rng(rank)
    hidden = np.random.default_rng(99).standard_normal(IDS) * 0.5
    for _ in range(count):
        ids = (IDS * random.random((size, SLOTS)) ** 4).astype(np.int64)
        dense = random.standard_normal((size, DENSE)).astype(np.float32)
        chance = 1 / (1 + np.exp(1.0 - hidden[ids].sum(1) - 0.3 * dense[:, 0]))
        yield dense, ids, (random.random(size) < chance).astype(np.float32)[:, None]


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Clock:
    """Processor and wall time from the step WARM on; told as a line of JSON."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, number: int, loss: float) -> None:
        if number == WARM - 1:
            print(json.dumps({"warm": True}), flush=True)
            sys.stdin.readline()
            self.wall, self.cpu = time.perf_counter(), _own_cpu()
        self.losses.append(loss)

    def tell(self) -> None:
        wall, cpu = time.perf_counter() - self.wall, _own_cpu() - self.cpu
        print(json.dumps({"wall": wall, "cpu": cpu, "loss": float(np.mean(self.losses[-20:]))}), flush=True)
        sys.stdin.readline()


def _own_cpu() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


# ---- ours


def our_server(port: int) -> None:
    from plsc.ps import Server, Table

    with Server({"t": Table(DIM, rule="sgd", lr=0.05, locked=True)}, port=port) as server:
        print("serving", flush=True)
        server.wait()


def our_worker(job: dict[str, Any]) -> None:
    import torch

    import plsc

    torch.set_num_threads(1)
    torch.manual_seed(0)
    geo = job["mode"] == "geo"
    apart = GEO if geo and job["workers"] > 1 else 0  # steps that dense weights go alone
    args = {"every": GEO} if geo else {}
    still = torch.zeros(job["batch"], SLOTS, DIM, requires_grad=True)
    if job["who"] == "dense":
        fleet, sparse = plsc.Fleet(), None
    else:
        fleet = plsc.Fleet(plsc.Strategy(ps=job["mode"], servers=(job["server"],), ps_args=args, local_sgd=apart))
        sparse = fleet.embedding("t", dim=DIM, pooling="none")
    layers = [torch.nn.Linear(SLOTS * DIM + DENSE, WIDTH), torch.nn.ReLU()]
    for _ in range(2):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    net = fleet.replicate(torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1)))
    make = torch.optim.SGD if geo else torch.optim.Adam  # as Paddle's Geo, which knows SGD alone
    optimizer = make(net.parameters(), lr=0.05 if geo else 1e-3, fused=True)
    clock = Clock()
    for number, batch in enumerate(list(batches(job["rank"], WARM + job["steps"], job["batch"]))):
        dense, ids, clicked = map(torch.from_numpy, batch)
        rows = still if sparse is None else sparse(plsc.ps.slot_keys(ids))
        logits = net(torch.cat([rows.flatten(1), dense], 1))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked)
        fleet.step(loss, optimizer)
        clock.step(number, float(loss.detach()))
    fleet.meet(optimizer)
    clock.tell()


# ---- Paddle's; the environment says whether this process is a server


def paddle_process(job: dict[str, Any]) -> None:
    import paddle
    from paddle.distributed import fleet

    paddle.enable_static()
    dense = paddle.static.data("dense", [None, DENSE], "float32")
    ids = paddle.static.data("ids", [None, SLOTS], "int64")
    clicked = paddle.static.data("clicked", [None, 1], "float32")
    role = fleet.PaddleCloudRoleMaker(is_collective=False)
    fleet.init(role)
    # Rows by (slot, id), as slot_keys makes them: one table of all slots.
    keys = paddle.reshape(ids * SLOTS + paddle.arange(SLOTS, dtype="int64"), [-1, 1])
    uniform = paddle.ParamAttr(name="rows", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
    if job["mode"] == "geo":
        size = [IDS * SLOTS, DIM]
        rows = paddle.static.nn.embedding(keys, size=size, is_sparse=True, param_attr=uniform)
    else:
        rows = paddle.static.nn.sparse_embedding(keys, size=[IDS * SLOTS, DIM], param_attr=uniform)
    x = paddle.concat([paddle.reshape(rows, [-1, SLOTS * DIM]), dense], 1)
    for _ in range(3):
        x = paddle.static.nn.fc(x, WIDTH, activation="relu")
    logits = paddle.static.nn.fc(x, 1)
    loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(logits, clicked))
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    if job["mode"] == "geo":
        strategy.a_sync_configs = {"k_steps": GEO}
    optimizer = paddle.optimizer.SGD(0.05) if job["mode"] == "geo" else paddle.optimizer.Adam(1e-3)  # Geo: SGD alone
    fleet.distributed_optimizer(optimizer, strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        print("serving", flush=True)
        fleet.run_server()
        return
    run = paddle.static.Executor(paddle.CPUPlace())
    run.run(paddle.static.default_startup_program())
    fleet.init_worker()
    clock = Clock()
    for number, (d, i, c) in enumerate(list(batches(job["rank"], WARM + job["steps"], job["batch"]))):
        feed = {"dense": d, "ids": i, "clicked": c}
        found = run.run(paddle.static.default_main_program(), feed=feed, fetch_list=[loss])
        clock.step(number, float(np.mean(found[0])))
    clock.tell()


# ---- the comparison


def measure(who: str, mode: str, workers: int, args: argparse.Namespace) -> dict[str, float]:
    """Samples a CPU-second of all processes and a second of wall, the mean of the last losses."""
    ours = who != "paddle"
    python = sys.executable if ours else args.paddle
    port, *others = _ports(workers + 2)
    job = {"who": who, "mode": mode, "workers": workers, "steps": args.steps, "batch": args.batch}
    job["server"] = f"127.0.0.1:{port}"
    base = {**os.environ, "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(others[-1])}
    base |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CPU_NUM": "1"}
    if not ours:
        base |= {
            "PADDLE_WITH_GLOO": "0",
            "PADDLE_TRAINERS_NUM": str(workers),
            "PADDLE_PSERVERS_IP_PORT_LIST": job["server"],
            "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{other}" for other in others[:workers]),
            "POD_IP": "127.0.0.1",
            "GLOG_v": "0",
        }
    started = []

    def start(**more: Any) -> Any:
        own = {**job, **more}
        environment = {**base, "RANK": str(own["rank"]), "LOCAL_RANK": str(own["rank"])}
        if not ours:
            server = own["role"] == "server"
            environment["TRAINING_ROLE"] = "PSERVER" if server else "TRAINER"
            environment["PADDLE_PORT"] = str(port if server else others[own["rank"]])
            environment["PADDLE_TRAINER_ID"] = str(own["rank"])
        command = [python, __file__, "--job", json.dumps(own)]
        log = open(f"{args.logs}/{who}-{mode}-{own['role']}-{own['rank']}.log", "w")  # noqa: SIM115
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True))
        return started[-1]

    try:
        server = start(role="server", rank=0)
        crew = [start(role="worker", rank=rank) for rank in range(workers)]
        for each in crew:
            _line(each, "warm")
        before = cpu_of(server.pid)
        for each in crew:
            print(file=each.stdin, flush=True)
        told = [_line(each, "wall") for each in crew]
        server_cpu = cpu_of(server.pid) - before
        samples = workers * args.steps * args.batch
        return {
            "cpu": samples / (sum(each["cpu"] for each in told) + server_cpu),
            "server": server_cpu,
            "wall": samples / max(each["wall"] for each in told),
            "loss": float(np.mean([each["loss"] for each in told])),
        }
    finally:
        for each in started:
            each.send_signal(signal.SIGKILL)
            each.communicate()


def _line(process: Any, word: str) -> dict[str, Any]:
    """The next line of JSON that has this word; Paddle says other things too."""
    for line in process.stdout:
        if line.startswith("{") and word in line:
            found: dict[str, Any] = json.loads(line)
            return found
    raise SystemExit(f"a process ended before it told {word!r}; see its log")


def _ports(count: int) -> list[int]:
    from plsc.ps.launch import free_ports

    return free_ports(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paddle", default="", help="the Python that has PaddlePaddle 2.6.2")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1, help="medians are shown")
    parser.add_argument("--modes", nargs="+", default=["async", "geo"], choices=["async", "geo"])
    parser.add_argument("--logs", default=".", help="folder for what the processes say")
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job = json.loads(args.job)
        if job["who"] == "paddle":
            paddle_process(job)
        elif job["role"] == "server":
            our_server(int(job["server"].rpartition(":")[2]))
        else:
            our_worker(job)
        return
    print("| mode | workers | who | samples a CPU-second | samples/s | server's CPU s | loss |")
    print("|---|---|---|---|---|---|---|")
    for mode in args.modes:
        for workers in args.workers:
            crew = ("paddle", "plsc", *(["dense"] if workers == 1 else []))
            turns = [{who: measure(who, mode, workers, args) for who in crew} for _ in range(args.rounds)]
            for who in crew:
                found = {name: float(np.median([turn[who][name] for turn in turns])) for name in turns[0][who]}
                ratio = float(np.median([turn[who]["cpu"] / turn["paddle"]["cpu"] for turn in turns]))
                print(
                    f"| {mode} | {workers} | {who} | {found['cpu']:,.0f} ({ratio:.2f}) | "
                    f"{found['wall']:,.0f} | {found['server']:.1f} | {found['loss']:.4f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
