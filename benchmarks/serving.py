"""Search and service against what they are made of, in ratios of CPU seconds taken in turn in one run.

    python benchmarks/serving.py search [--rows 1000000] [--dim 512] [--repeats 5]
    python benchmarks/serving.py service [--backbone iresnet50] [--seconds 60]
    python benchmarks/serving.py load [--backbone mobilefacenet] [--minutes 10]

search: exact search by blocks against the bare products over the same rows, memory beyond the rows, recall of fp16 and
int8. service: images a CPU second of the server at 16 clients against ONNX Runtime's own rate for batches of 16.
load: clients with bad requests among good ones; memory over time and every status that came.
"""

import argparse
import http.client
import io
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from plsc.models import build
from plsc.serve.bundle import Bundle, write_bundle
from plsc.serve.client import Client, ServiceError
from plsc.serve.index import Index, quantize, recall
from plsc.train.export import export_centres, export_onnx, model_digest

CLIENTS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "service", "load"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--queries", type=int, default=256, help="that recall is measured with")
    parser.add_argument("--backbone", default="iresnet50")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"search": search, "service": service, "load": load}[args.what](args)


# ---- search


def search(args: argparse.Namespace) -> None:
    rows, queries = unit(args.rows, args.dim, 0), unit(args.batch, args.dim, 1)
    index, block = Index(rows), max(1, 2 * 2**20 // (4 * args.dim))
    x, weight = torch.from_numpy(queries), torch.from_numpy(rows)
    out = torch.empty(args.batch, block)

    def products() -> None:
        """The bare products by the same blocks: faster than one product of all, whose result does not fit the cache."""
        for start in range(0, len(weight), block):
            part = weight[start : start + block]
            torch.mm(x, part.T, out=out[:, : len(part)] if len(part) < block else out)

    def whole() -> None:
        torch.mm(x, weight.T)

    before = peak(reset=True)
    index.search(queries, 10)
    extra = (peak() - before) / rows.nbytes
    times = interleaved(
        {"products": products, "whole": whole, "search": lambda: index.search(queries, 10)}, args.repeats
    )
    print(f"{args.rows} x {args.dim}, batch {args.batch}, top-10, {args.threads} thread(s)")
    print(f"CPU seconds, median of {args.repeats} rounds")
    for name, values in times.items():
        print(f"  {name:9} {statistics.median(values):8.3f}   rate against search {ratio(times, name):.3f}")
    print(f"  memory beyond the rows: {100 * extra:.2f} % of their {rows.nbytes / 2**30:.2f} GiB")
    asked = unit(args.queries, args.dim, 2)
    wanted = index.search(asked, 10)[1]
    for storage in ("fp16", "int8"):
        codes, scales = quantize(rows, storage)
        small = Index(codes, scales=scales)
        spent = cpu(lambda small=small: small.search(queries, 10))
        share = codes.nbytes / rows.nbytes
        found = recall(small.search(asked, 10)[1], wanted)
        print(f"  {storage}: {share:.2f} of the bytes, recall@10 {found:.4f}, {spent:.3f} CPU s")


def ratio(times: dict[str, list[float]], name: str) -> float:
    """Median over rounds of the time of `name` divided by that of the search of the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times["search"], strict=True))


# ---- service


def service(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Bundle.open(make_bundle(Path(scratch), args.backbone), threads=args.threads)
        size = bundle.manifest.image_size
        images = [picture(seed, size) for seed in range(CLIENTS)]
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in images])
        with Server(bundle.folder, "--threads", str(args.threads), "--max-batch", str(CLIENTS)) as server:
            ratios, latencies, counted = [], [], Counter()
            for _ in range(args.repeats):  # a stretch of one, a stretch of the other
                done, stop = 0, time.perf_counter() + args.seconds / (2 * args.repeats)
                started = time.process_time()
                while time.perf_counter() < stop:
                    bundle.model.embed(pixels)
                    done += len(pixels)
                bare = done / (time.process_time() - started)
                before = server.cpu_seconds()
                answered, spent = drive(server.url, images, args.seconds / (2 * args.repeats), counted)
                served = answered / (server.cpu_seconds() - before)
                ratios.append(served / bare)
                latencies += spent
                print(
                    f"  bare {bare:7.2f} images a CPU second, served {served:7.2f}, ratio {served / bare:.3f}",
                    flush=True,
                )
        p50, p99 = np.percentile(latencies, (50, 99))
        print(f"{args.backbone}: served / bare {statistics.median(ratios):.3f}, {CLIENTS} clients")
        print(f"p50 {p50:.3f} s, p99 {p99:.3f} s; answers {dict(counted)}")


def drive(url: str, images: list[bytes], seconds: float, counted: Counter[Any]) -> tuple[int, list[float]]:
    """Answers and their seconds, of CLIENTS clients that ask again as soon as they are answered."""
    stop, spent = time.perf_counter() + seconds, [[] for _ in range(CLIENTS)]

    def ask(number: int) -> None:
        with Client(url, timeout=120) as client:
            while (started := time.perf_counter()) < stop:
                client.embed([images[number]])
                spent[number].append(time.perf_counter() - started)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flat = [one for each in spent for one in each]
    counted[200] += len(flat)
    return len(flat), flat


# ---- load


def load(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_bundle(Path(scratch), args.backbone)
        size = Bundle.open(folder).manifest.image_size
        images = [picture(seed, size) for seed in range(CLIENTS)]
        flags = ("--threads", str(args.threads), "--gallery", str(Path(scratch) / "gallery"))
        with Server(folder, *flags) as server:
            counted: Counter[Any] = Counter()
            stop = time.perf_counter() + 60 * args.minutes
            threads = [
                threading.Thread(target=misbehave, args=(server.url, images, number, stop, counted))
                for number in range(CLIENTS)
            ]
            for thread in threads:
                thread.start()
            sizes = []
            while time.perf_counter() < stop:
                time.sleep(min(10, max(0.1, stop - time.perf_counter())))
                sizes.append(server.memory())
                print(f"  {server.memory() / 2**20:7.1f} MiB   {dict(sorted(counted.items(), key=str))}", flush=True)
            for thread in threads:
                thread.join()
            third = len(sizes) // 3
            early, late = statistics.median(sizes[third : 2 * third or 1]), statistics.median(sizes[2 * third :])
            print(f"memory: {early / 2**20:.1f} MiB in the middle third, {late / 2**20:.1f} MiB in the last")
            print(f"answers {dict(counted)}")


def misbehave(url: str, images: list[bytes], seed: int, stop: float, counted: Counter[Any]) -> None:
    """A client of which a third of the requests are bad."""
    rng = np.random.default_rng(seed)
    client = Client(url, timeout=120)
    while time.perf_counter() < stop:
        kind, image = int(rng.integers(9)), images[int(rng.integers(len(images)))]
        try:
            if kind == 0:
                client.embed([image[: len(image) // 2]])
            elif kind == 1:
                client.search(embeddings=[[float("nan")] * 3])
            elif kind == 2:
                client.embed([os.urandom(20_000)] * 3)
            elif kind == 3:
                client.remove(client.add(f"name {seed}", [image])[0])
            elif kind == 4:
                client.verify([image, image])
            else:
                client.search([image], k=10)
            counted[200] += 1
        except ServiceError as error:
            counted[error.status] += 1
        except (OSError, http.client.HTTPException) as error:
            counted[type(error).__name__] += 1
            client = Client(url, timeout=120)


# ---- what they share


class Server:
    """plsc-serve as a process; as a context."""

    def __init__(self, bundle: Path, *flags: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._command = [sys.executable, "-m", "plsc.cli", "serve", str(bundle), "--port", "0", *flags]
        self._environment = environment

    def __enter__(self) -> "Server":
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, env=self._environment)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"serving at (\S+)", line):
                self.url = found[1]
                return self
        raise SystemExit("the server did not start")

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_bundle(folder: Path, name: str, *, size: int = 112, classes: int = 1000) -> Path:
    torch.manual_seed(0)
    backbone = build(name, 512, image_size=size, in_channels=3).eval()
    export_onnx(backbone, folder / "model.onnx", image_size=size, check=False)
    export_centres(folder / "centres.safetensors", unit(classes, 512, 0), digest=model_digest(backbone))
    given = {"onnx": folder / "model.onnx", "centres": folder / "centres.safetensors"}
    return write_bundle(folder / "bundle", name=name, plsc_version="0", flip=False, **given)


def picture(seed: int, size: int) -> bytes:
    """A JPEG of smooth noise, of about the bytes that a face crop has."""
    rough = np.random.default_rng(seed).integers(0, 256, (size // 4, size // 4, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(rough).resize((size, size), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def unit(count: int, dim: int, seed: int) -> np.ndarray:
    rng, rows = np.random.default_rng(seed), np.empty((count, dim), np.float32)
    for start in range(0, count, 65_536):
        block = rng.standard_normal((min(65_536, count - start), dim), dtype=np.float32)
        rows[start : start + len(block)] = block / np.linalg.norm(block, axis=1, keepdims=True)
    return rows


def interleaved(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each, in turn, so that what disturbs one disturbs the others."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(cpu(work))
    return times


def cpu(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def peak(*, reset: bool = False) -> int:
    """The most memory this process has had at once; since now, with reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
