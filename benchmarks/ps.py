"""Tables on servers beside a bare Arrow Flight exchange of the same bytes, and what merging saves.

    python benchmarks/ps.py wire [--repeats 40] [--rows 500000]
    python benchmarks/ps.py merge [--batches 64]
    python benchmarks/ps.py capacity [--rows 2000000]
    python benchmarks/ps.py modes [--workers 2] [--steps 300] [--mbit 100]

wire    65,536 keys, dim 16, SGD, one server process: pull, push and pulls of 100 keys. All contenders take turns within
        one run; read the ratios. The table's own time is in ours and not in the bare exchange: it is shown beside.
merge   bytes that leave a worker, direct and merged, for Zipf(1.05) keys over 10 million ids.
capacity   the constants of the capacity model in docs/ps.md: bytes a row, seconds a save, a load, a logged push.
modes   a factorisation machine on synthetic clicks, workers as processes; with --mbit each over a link of that speed
        from a network namespace of its own (needs root). Samples a second of all, worker processor time, AUC.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from plsc.ps import Async, Direct, Geo, HalfAsync, Server, SparseEmbedding, Sync, Table, connect
from plsc.ps import wire as w

BATCH, DIM = 65_536, 16
flight, pa = w.flight, w.pa


class Bare(flight.FlightServerBase):
    """Takes the same messages as a Server and answers with as many bytes, copied once; there is no table."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.rows = np.ones(BATCH * DIM, np.float32)

    def do_exchange(self, context: object, descriptor: object, reader: object, writer: object) -> None:
        layout = w.LAYOUTS["fp32"]
        writer.begin(layout.schema)
        writer.write_metadata(b"hello")
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            keys, values, _ = layout.unpack(chunk.data)
            if len(values):
                writer.write_metadata(chunk.app_metadata)
            else:
                out = w.empty_floats(len(keys) * DIM, np.dtype(np.float32))
                out[:] = self.rows[: len(out)]
                writer.write_with_metadata(layout.pack(None, out), chunk.app_metadata)


class BareStream:
    """A client of Bare: one message out, one back."""

    def __init__(self, address: str) -> None:
        self.client = flight.FlightClient(f"grpc://{address}")
        self.writer, self.reader = self.client.do_exchange(flight.FlightDescriptor.for_command(b"{}"))
        self.layout = w.LAYOUTS["fp32"]
        self.writer.begin(self.layout.schema)
        self.reader.read_chunk()
        self.head = w.Request(w.PULL).pack()

    def __call__(self, keys: np.ndarray, values: np.ndarray | None = None) -> None:
        self.writer.write_with_metadata(self.layout.pack(keys, values), self.head)
        self.reader.read_chunk()


def serve_both(rows: int) -> None:
    """The server process: says where it listens, answers `cpu` with its processor seconds, ends with its input."""
    bare = Bare()
    threading.Thread(target=bare.serve, daemon=True).start()
    table = Table(DIM, rule="sgd", lr=0.01, locked=True)
    for start in range(0, rows, BATCH):
        table.pull(np.arange(start, min(start + BATCH, rows), dtype=np.uint64))
    server = Server({"t": table})
    print(f"127.0.0.1:{bare.port} {server.address}", flush=True)
    for _ in sys.stdin:
        spent = resource.getrusage(resource.RUSAGE_SELF)
        print(spent.ru_utime + spent.ru_stime, flush=True)
    os._exit(0)


def measure_wire(repeats: int, rows: int) -> None:
    command = [sys.executable, __file__, "serve", "--rows", str(rows)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        bare_address, address = child.stdout.readline().split()

        def cpu() -> float:
            child.stdin.write("\n")
            child.stdin.flush()
            return float(child.stdout.readline()) + time.process_time()

        bare, local = BareStream(bare_address), Table(DIM, rule="sgd", lr=0.01, locked=True)
        random = np.random.default_rng(0)
        batches = [random.choice(rows, BATCH, replace=False).astype(np.uint64) for _ in range(8)]
        few = [batch[:100].copy() for batch in batches]
        grads, out = random.standard_normal((BATCH, DIM)).astype(np.float32), np.empty((BATCH, DIM), np.float32)
        for start in range(0, rows, BATCH):
            local.pull(np.arange(start, min(start + BATCH, rows), dtype=np.uint64))
        with connect(address, table="t") as store:
            for name, count, contenders in (
                (
                    "pull",
                    BATCH,
                    {
                        "bare exchange": lambda i: bare(batches[i]),
                        "remote": lambda i: store.pull(batches[i], out=out),
                        "table alone": lambda i: local.pull(batches[i], out=out),
                    },
                ),
                (
                    "push",
                    BATCH,
                    {
                        "bare exchange": lambda i: bare(batches[i], grads),
                        "remote": lambda i: store.push(batches[i], grads),
                        "table alone": lambda i: local.push(batches[i], grads),
                    },
                ),
                (
                    "pull of 100",
                    100,
                    {
                        "bare exchange": lambda i: bare(few[i]),
                        "remote": lambda i: store.pull(few[i]),
                        "table alone": lambda i: local.pull(few[i]),
                    },
                ),
            ):
                turns = repeats if count == BATCH else 50 * repeats
                compare(name, count, contenders, turns, cpu)
        child.stdin.close()


def compare(
    name: str, keys: int, contenders: dict[str, Callable[[int], object]], turns: int, cpu: Callable[[], float]
) -> None:
    """Wall and processor time of each, both processes together; they take turns."""
    wall: dict[str, list[float]] = {each: [] for each in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    block = 1 if keys == BATCH else 50
    for turn in range(-3, turns // block):
        for each, work in contenders.items():
            before = cpu()
            times = []
            for i in range(block):
                start = time.perf_counter()
                work((turn + i) % 8)
                times.append(time.perf_counter() - start)
            if turn >= 0:
                spent[each] += cpu() - before
                wall[each] += times
    base = float(np.median(wall["bare exchange"]))
    for each, times in wall.items():
        p50, p99 = np.percentile(times, [50, 99])
        print(
            f"{name:12} {each:14} {keys / p50 / 1e6:7.2f} Mrows/s  p50 {p50 * 1e6:8.0f} us  p99 {p99 * 1e6:8.0f} us  "
            f"cpu {1e6 * spent[each] / len(times):8.0f} us  speed/bare {base / p50:5.2f}"
        )


def measure_merge(batches: int) -> None:
    random = np.random.default_rng(0)
    weights = np.cumsum(np.arange(1, 10_000_001, dtype=np.float64) ** -1.05)
    drawn = [np.searchsorted(weights, random.random(BATCH) * weights[-1]).astype(np.uint64) for _ in range(batches)]
    grads = random.standard_normal((BATCH, DIM)).astype(np.float32)
    unique = float(np.mean([len(np.unique(keys)) / BATCH for keys in drawn]))
    print(f"{batches} batches of {BATCH} keys; duplication factor of a batch {1 / unique:.2f}")
    direct = 0
    for merge, wire in ((0, "fp32"), (1, "fp32"), (2, "fp32"), (8, "fp32"), (8, "fp16")):
        with (
            Server({"t": Table(DIM, rule="sgd", locked=True)}) as server,
            connect(server.address, table="t", wire=wire) as store,
        ):
            if merge == 0:
                for keys in drawn:
                    store.push(keys, grads)
            else:
                with Async(store, merge=max(merge, 2), linger=60, queue=max(merge, 2)) as queued:
                    for number, keys in enumerate(drawn):
                        queued.push(keys, grads)
                        if (number + 1) % merge == 0:
                            queued.flush()
            sent = server.meters["t"].bytes["in"]
        direct = direct or sent
        name = "direct" if merge == 0 else f"merge {merge} {wire}"
        print(f"{name:14} {sent / batches / BATCH:6.1f} bytes a key, {direct / sent:5.2f} times fewer")


def measure_capacity(rows: int) -> None:
    table = Table(DIM, rule="adagrad", locked=True)
    random = np.random.default_rng(0)
    keys = random.permutation(rows).astype(np.uint64)
    grads = random.standard_normal((BATCH, DIM)).astype(np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = [time.process_time()]
    for start in range(0, rows, BATCH):
        table.push(keys[start : start + BATCH], grads[: len(keys[start : start + BATCH])])
    clock.append(time.process_time())
    stats, grown = table.stats(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{rows} rows of {stats['payload_bytes'] // rows} bytes: index {stats['index_bytes'] / rows:.1f} bytes a row, "
    )
    print(
        f"process {grown * 1024 / rows:.1f} bytes a row; made at {rows / (clock[1] - clock[0]) / 1e6:.2f} Mrows/cpu-s"
    )
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for name, work in (
            ("save", lambda: table.save(f"{folder}/t")),
            ("load", lambda: Table.load(f"{folder}/t", locked=True)),
        ):
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            size = os.path.getsize(f"{folder}/t")
            speed = f"{size / wall / 1e6:.0f} MB/s, {rows / cpu / 1e6:.2f} Mrows/cpu-s"
            print(f"{name}: {size / rows:.1f} bytes a row, {speed}")
        for durability in ("none", "log"):
            options = {"folder": f"{folder}/s", "durability": durability} if durability == "log" else {}
            with Server({"t": Table(DIM, rule="adagrad", locked=True)}, **options) as server:
                host, times = server.hosts["t"], []
                client = host.join("c", 0)
                for number in range(20):
                    start = time.process_time()
                    host.push(client, number + 1, keys[:BATCH], grads)
                    times.append(time.process_time() - start)
            print(f"push of {BATCH} keys, durability {durability}: {np.median(times) * 1e3:.2f} ms of processor")


# ---- modes: a factorisation machine whose every weight is a row, so that nothing but the store couples the workers

IDS, SLOTS, SAMPLES = 200_000, 8, 512
MODES = {
    "direct": lambda store, workers: Direct(store),
    "async": lambda store, workers: Async(store, merge=8, linger=0.05),
    "half": lambda store, workers: HalfAsync(store, every=8),
    "sync": lambda store, workers: Sync(store, workers=workers, deadline=300),
    "geo": lambda store, workers: Geo(store, every=50, workers=workers),
    "geo overlap": lambda store, workers: Geo(store, every=50, workers=workers, overlap=True),
}
TOKEN = "benchmark-benchmark"


def clicks(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zipf ids of eight slots and clicks that a hidden factorisation machine throws."""
    random = np.random.default_rng(seed)
    ids = (IDS / SLOTS * random.random((count, SLOTS)) ** 4).astype(np.int64) * SLOTS + np.arange(SLOTS)
    hidden = np.random.default_rng(99)
    weight, factor = hidden.standard_normal(IDS) * 0.6, hidden.standard_normal((IDS, 3)) * 0.35
    v = factor[ids]
    logit = weight[ids].sum(1) + 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(1) - 1.0
    clicked = random.random(count) < 1 / (1 + np.exp(-logit))
    return torch.from_numpy(ids), torch.from_numpy(clicked.astype(np.float32))


def predict(sparse: SparseEmbedding, ids: torch.Tensor) -> torch.Tensor:
    rows = sparse(ids)  # [B, S, 9]
    v = rows[..., 1:]
    return rows[..., 0].sum(1) + 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1) - 1.0


def work(job: dict[str, Any]) -> None:
    """One worker process: trains its share, says how long that took."""
    torch.set_num_threads(1)
    ids, clicked = clicks(1 + job["rank"], job["steps"] * SAMPLES)
    with connect(job["server"], table="t", rank=job["rank"], token=TOKEN, wire=job["wire"]) as store:
        mode = MODES[job["mode"]](store, job["workers"])
        sparse = SparseEmbedding(mode, pooling="none")
        print("ready", flush=True)
        sys.stdin.readline()
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(job["steps"]):
            some = slice(step * SAMPLES, (step + 1) * SAMPLES)
            logits = predict(sparse, ids[some])
            torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked[some]).backward()
        mode.close()
        print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)
        sys.stdin.readline()


def measure_modes(workers: int, steps: int, mbit: int, names: list[str]) -> None:
    ids, clicked = clicks(0, 50_000)
    with Links(workers, mbit) as links:
        print(f"{workers} workers, {steps} steps of {SAMPLES} samples each, link {mbit or 'loopback'}")
        for name in names:
            table = Table(9, rule="adagrad", lr=0.1, locked=True, init_scale=0.02)
            with Server({"t": table}, host=links.host, token=TOKEN) as server:
                crew = []
                for rank in range(workers):
                    job = {"rank": rank, "workers": workers, "steps": steps, "mode": name, "wire": "fp32"}
                    job["server"] = f"{links.address(rank)}:{server.port}"
                    command = [*links.prefix(rank), sys.executable, __file__, "worker", "--job", json.dumps(job)]
                    crew.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
                for each in crew:
                    assert each.stdout.readline() == "ready\n"
                for each in crew:
                    print(file=each.stdin, flush=True)
                times = np.array([[float(x) for x in each.stdout.readline().split()] for each in crew])
                for each in crew:
                    each.communicate("\n")
                meter = server.meters["t"]
                sent = (meter.bytes["in"] + meter.bytes["out"]) / (workers * steps * SAMPLES)
            sparse = SparseEmbedding(table, pooling="none").eval()
            with torch.no_grad():
                auc = area(predict(sparse, ids).numpy(), clicked.numpy())
            speed = workers * steps * SAMPLES / times[:, 0].max()
            print(
                f"{name:12} {speed:9.0f} samples/s  {1e6 * times[:, 1].sum() / (workers * steps * SAMPLES):6.1f} us of "
                f"worker cpu a sample  {sent:6.0f} bytes a sample  AUC {auc:.4f}",
                flush=True,
            )


def area(scores: np.ndarray, clicked: np.ndarray) -> float:
    """AUC: the share of (clicked, not clicked) pairs in the right order."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = clicked.sum()
    return float((ranks[clicked == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(scores) - positive)))


class Links:
    """A network namespace for each worker, whose link to the server carries `mbit`; 0: all on loopback."""

    def __init__(self, workers: int, mbit: int) -> None:
        self.workers, self.mbit = workers, mbit
        self.host = "0.0.0.0" if mbit else "127.0.0.1"

    def __enter__(self) -> "Links":
        for rank in range(self.workers if self.mbit else 0):
            name, inner = f"plscb{rank}", f"plscc{rank}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", name, "type", "veth", "peer", "name", inner)
            _run("ip", "link", "set", inner, "netns", name)
            _run("ip", "addr", "add", f"10.78.{rank}.1/24", "dev", name)
            _run("ip", "link", "set", name, "up")
            _run("ip", "-n", name, "addr", "add", f"10.78.{rank}.2/24", "dev", inner)
            _run("ip", "-n", name, "link", "set", inner, "up")
            shape = ["root", "tbf", "rate", f"{self.mbit}mbit", "burst", "128kb", "latency", "400ms"]
            _run("tc", "qdisc", "add", "dev", name, *shape)
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", inner, *shape)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(self.workers if self.mbit else 0):
            subprocess.run(["ip", "link", "del", f"plscb{rank}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", f"plscb{rank}"], capture_output=True)

    def address(self, rank: int) -> str:
        return f"10.78.{rank}.1" if self.mbit else "127.0.0.1"

    def prefix(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", f"plscb{rank}"] if self.mbit else []


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["wire", "merge", "capacity", "modes", "serve", "worker"])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mbit", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--job", default="{}", help="of a worker, as JSON")
    args = parser.parse_args()
    if args.what == "serve":
        serve_both(args.rows)
    elif args.what == "wire":
        measure_wire(args.repeats, args.rows)
    elif args.what == "merge":
        measure_merge(args.batches)
    elif args.what == "capacity":
        measure_capacity(args.rows)
    elif args.what == "modes":
        measure_modes(args.workers, args.steps, args.mbit, args.modes)
    elif args.what == "worker":
        work(json.loads(args.job))


if __name__ == "__main__":
    main()
