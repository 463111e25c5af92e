"""Search and service against what they are made of, in ratios of CPU seconds taken in turn in one run.

    python benchmarks/serving.py search [--rows 1000000] [--dim 512] [--repeats 5]
    python benchmarks/serving.py service [--backbone iresnet50] [--seconds 60]
    python benchmarks/serving.py load [--backbone mobilefacenet] [--seconds 600]
    python benchmarks/serving.py embed [--backbone iresnet50] [--images 512] [--folder DIR_OR_ZIP] [--workers 0]

search: exact search by blocks against the bare products over the same rows, memory beyond the rows, recall of fp16 and
int8. service: images a CPU second of the server at 16 clients against ONNX Runtime's own rate for batches of 16, and
how long the answers take. load: 16 clients, a third of whose requests are bad; memory, open files and threads of the
server over time, every status that came, and a verdict: the exit status is 1 where an answer is not the one that was
asked for, or where memory grows. embed: what plsc-embed does against decoding and the network done bare.
"""

import argparse
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
from misbehaviour import Tally, misbehave, verdict
from PIL import Image

from plsc.comm import LocalCommunicator
from plsc.data import ImageFolder
from plsc.data.decoding import decode_image
from plsc.models import build
from plsc.serve.bundle import Bundle, write_bundle
from plsc.serve.client import Client
from plsc.serve.index import Index, quantize, recall
from plsc.train.bulk import embed_to_file
from plsc.train.export import export_centres, export_onnx, model_digest

CLIENTS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "service", "load", "embed"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--queries", type=int, default=256, help="that recall is measured with")
    parser.add_argument("--backbone", default="iresnet50")
    parser.add_argument("--seconds", type=float, default=60.0, help="of service or load; 600 is the load to believe")
    parser.add_argument("--images", type=int, default=512, help="that embed makes, unless it is given a folder")
    parser.add_argument("--folder", help="that embed reads: NAME/*.jpg of 112 x 112, or a .zip of it")
    parser.add_argument("--workers", type=int, default=0, help="processes that read for embed")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"search": search, "service": service, "load": load, "embed": embed}[args.what](args)


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
        flags = ("--threads", str(args.threads), "--gallery", str(Path(scratch) / "gallery"), "--max-mb", "1")
        with Server(folder, *flags) as server:
            tally, stop = Tally(), time.perf_counter() + args.seconds
            given = [(server.url, images, number, stop, tally) for number in range(CLIENTS)]
            threads = [threading.Thread(target=misbehave, args=one) for one in given]
            for thread in threads:
                thread.start()
            sizes = []
            while time.perf_counter() < stop:
                time.sleep(min(max(1.0, args.seconds / 60), max(0.1, stop - time.perf_counter())))
                sizes.append(server.memory())
                held = f"{sizes[-1] / 2**20:7.1f} MiB, {server.open_files()} files, {server.threads()} threads"
                print(f"  {held}; {sum(tally.answers.values())} answers, {sum(tally.wrong.values())} wrong", flush=True)
            for thread in threads:
                thread.join()
            time.sleep(1)  # for connections to be taken down
            at_rest = f"{server.open_files()} files, {server.threads()} threads"
        told = verdict(tally, sizes)
        counted = dict(sorted(tally.answers.items(), key=str))
        print(f"{args.backbone}, {args.seconds:g} s, {CLIENTS} clients: answers {counted}")
        print(f"at rest afterwards: {at_rest}")
        print("\n".join(told))
        if any(line.startswith("FAIL") for line in told):
            raise SystemExit(1)


# ---- embed


def embed(args: argparse.Namespace) -> None:
    """Rounds of both; the bare one does what cannot be left out: read, decode, make floats, run the network twice."""
    torch.manual_seed(0)
    model = build(args.backbone, 512, image_size=112, in_channels=3).eval()
    with tempfile.TemporaryDirectory() as scratch:
        data = ImageFolder(args.folder or make_folder(Path(scratch) / "images", args.images), image_size=112)
        target, batch = Path(scratch) / "out.safetensors", args.batch

        def bare() -> np.ndarray:
            found, pixels = [], np.empty((batch, 112, 112, 3), np.uint8)
            with torch.no_grad():
                for start in range(0, len(data), batch):
                    count = min(batch, len(data) - start)
                    for k in range(count):
                        pixels[k] = decode_image(data.encoded(start + k), 112)
                    x = torch.from_numpy(pixels[:count]).permute(0, 3, 1, 2).float().sub_(127.5).div_(127.5)
                    found.append((model(x) + model(x.flip(-1))).numpy())
            return np.concatenate(found)

        def ours() -> None:
            given = {"source": "images", "comm": LocalCommunicator(), "workers": args.workers}
            embed_to_file(model, data, target, batch_size=batch, overwrite=True, **given)

        works = {"bare": bare, "plsc-embed": ours}
        for work in works.values():
            work()  # memory and caches
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        for number in range(args.repeats):
            for name in sorted(works, reverse=bool(number % 2)):  # who goes first takes turns
                spent[name].append(both_clocks(works[name]))
        print(f"{args.backbone}, {len(data)} images, batches of {batch}, {args.workers} worker(s)")
        for name, values in spent.items():
            busy, passed = (len(data) / statistics.median(column) for column in zip(*values, strict=True))
            print(f"  {name:10} {busy:8.1f} images a CPU second, {passed:8.1f} a second of the clock")
        pairs = list(zip(spent["bare"], spent["plsc-embed"], strict=True))
        for k, clock in enumerate(("CPU seconds", "the clock")):
            ratios = [one[k] / other[k] for one, other in pairs]
            words = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            print(f"plsc-embed / bare by {clock}: {words}, median and range of {args.repeats} rounds")


def both_clocks(work: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of this process and of those it has ended, and seconds."""

    def busy() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    before, started = busy(), time.perf_counter()
    work()
    return busy() - before, time.perf_counter() - started


def make_folder(folder: Path, count: int) -> Path:
    for number in range(count):
        place = folder / f"{number % 50:03d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06d}.jpg").write_bytes(picture(number, 112))
    return folder


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

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/task"))

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
