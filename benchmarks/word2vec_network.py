"""Word vectors on workers behind slow links: what Sync, Async and Geo can reach, by a model and as measured.

    python benchmarks/word2vec_network.py model CORPUS [--workers 4] [--mbit 100] [--every 1 8 26 128]
    python benchmarks/word2vec_network.py measure CORPUS --similarity wordsim353.tsv \
        --modes sync:200000 async:200000 geo26 [--wire int8] [--pace 0.0006] [--epochs 3] [--seeds 5]    # as root

CORPUS and the settings of the loop: as word2vec.py; negatives shared per centre word.

model    from the text: rows that a batch of 10,000 words touches, that an exchange after k batches carries, and that
         others change meanwhile; words a CPU-second of the loop. A row of 100 numbers is 400 bytes in fp32, 200 in
         fp16, 104 in int8 (with its scale); a key 8. Every core's own, so no more than two workers' here.
measure  one server process, each worker a process in a network namespace of its own whose link carries so many Mbit/s
         each way. Words a second of all workers together, bytes a word, Spearman of the server's vectors at the end.
         sync:200000 stops after so many words of all workers: for a speed, without a similarity. --wire and --pace are
         Geo's; the others send fp32, or fp16 as in sync/fp16.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from ps import TOKEN, Links
from word2vec import DIM, Corpus, new_loop, new_tables, train_ours, vectors_of

from plsc.data.text import Encoded, Vocabulary
from plsc.ps import Async, Geo, Server, Sync, connect
from plsc.train.word_metrics import similarity

ROWS, KEY = {"fp32": 4 * DIM, "fp16": 2 * DIM, "int8": DIM + 4}, 8
NAMES = ("words", "contexts")


# ---- the model


def model(corpus: Corpus, workers: int, mbit: int, everies: list[int]) -> None:
    loop = new_loop(corpus, new_tables(0), shared=True, seed=0)
    start, sample = time.process_time(), Limited(corpus, 300_000)
    rate = train_ours(sample, loop, 1) / (time.process_time() - start)
    length = max(everies)
    touched: list[list[np.ndarray]] = [[] for _ in range(workers)]
    words = 0
    for number, batch in enumerate(corpus.batches()):
        if number == length * workers:
            break
        marks = np.zeros((2, len(corpus.vocabulary)), np.uint8)
        loop._core.touched(batch.tokens, batch.starts, batch.first, 0, marks[0], marks[1])
        touched[number % workers].append(marks.astype(bool))
        words += len(batch.tokens)
    length = min(map(len, touched))
    n, link = words / sum(map(len, touched)), mbit * 1e6 / 8
    rows = float(np.mean([each.sum() for worker in touched for each in worker]))
    train = n / rate
    times = {}
    for wire in ("fp32", "fp16"):
        row = ROWS[wire]
        times[f"sync, {wire}"] = train + rows * (KEY + row + KEY + row) / link
        times[f"async, {wire}"] = max(train + rows * (KEY + row) / link, rows * (KEY + KEY + row) / link)
    print(f"a batch: {n:,.0f} words, {rows:,.0f} rows of both tables; {rate:,.0f} words a CPU-second")
    print("| mode | rows up and down a word | words/s a worker | to Sync | to Async |\n|---|---|---|---|---|")
    sync, overlapped = times["sync, fp32"], times["async, fp32"]

    def line(name: str, carried: float, seconds: float, count: float) -> None:
        print(
            f"| {name} | {carried:.2f} | {count / seconds:,.0f} | {sync / n * count / seconds:.1f} | "
            f"{overlapped / n * count / seconds:.1f} |"
        )

    for name, seconds in times.items():
        line(name, 2 * rows / n, seconds, n)
    for every in everies:
        if every > length:
            print(f"| geo, every {every} | the text is too short for {workers} workers | | | |")
            continue
        unions = [np.any(worker[:every], axis=0) for worker in touched]
        up = float(np.mean([each.sum() for each in unions]))
        others = [np.any([u for j, u in enumerate(unions) if j != i], axis=0) for i in range(workers)]
        down = float(np.mean([each.sum() for each in others]))
        for wire, row in ROWS.items():
            seconds = every * train + (up + down) * (KEY + row) / link
            line(f"geo, every {every}, {wire}", (up + down) / n / every, seconds, every * n)


class Limited:
    """The beginning of a corpus."""

    def __init__(self, corpus: Corpus, words: int) -> None:
        self._corpus, self.sentences = corpus, corpus.sentences
        self._words = words

    def batches(self, rank: int = 0, workers: int = 1) -> Any:
        left = self._words
        for batch in self._corpus.batches(rank, workers):
            yield batch
            left -= len(batch.tokens)
            if left <= 0:
                return


# ---- measured


def measure(corpus: Corpus, folder: str, path: str, args: argparse.Namespace) -> None:
    corpus.vocabulary.save(Path(folder) / "vocab.txt")
    print("| mode | seed | words/s | to the first | bytes a word | spearman |\n|---|---|---|---|---|---|")
    first = 0.0
    with Links(args.workers, args.mbit) as links:
        for number, (seed, name) in enumerate((seed, name) for seed in range(args.seeds) for name in args.modes):
            tables = dict(zip(NAMES, new_tables(seed, locked=True), strict=True))
            with Server(tables, host=links.host, token=TOKEN) as server:
                crew = []
                for rank in range(args.workers):
                    job = {"rank": rank, "workers": args.workers, "mode": name, "folder": folder}
                    job |= {"sentences": corpus.sentences, "server": f"{links.address(rank)}:{server.port}"}
                    job |= {"weight": args.weight, "pace": args.pace, "wire": args.wire, "epochs": args.epochs}
                    job |= {"seed": seed, "rounds": args.rounds}
                    command = [*links.prefix(rank), sys.executable, __file__, "worker", "-", "--job", json.dumps(job)]
                    crew.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
                for each in crew:
                    assert each.stdout.readline() == "ready\n"
                for each in crew:
                    print(file=each.stdin, flush=True)
                told = [each.stdout.readline().split() for each in crew]
                slowest, words = max(float(seconds) for seconds, _ in told), sum(int(count) for _, count in told)
                for each in crew:
                    each.communicate("\n")
                sent = sum(sum(meter.bytes.values()) for meter in server.meters.values())
            rate = words / slowest
            first = first if number % len(args.modes) else rate
            part = ":" in name
            found = 0.0 if part else similarity(vectors_of(corpus, tables["words"]), path)["spearman"]
            cells = f"{rate:,.0f} | {rate / first:.1f} | {sent / words:,.0f} | {'' if part else f'{found:.3f}'}"
            print(f"| {name} | {seed} | {cells} |", flush=True)


def open_mode(name: str, job: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The stores of both tables, as `name` wants them, and what they are around."""
    kind, _, wire = name.partition(":")[0].partition("/")
    geo = kind.startswith("geo")
    options = {"rank": job["rank"], "token": TOKEN, "wire": job["wire"] if geo else wire or "fp32", "timeout": 300}
    remote = [connect(job["server"], table=table, **options) for table in NAMES]
    if kind == "sync":
        return [Sync(store, workers=job["workers"], deadline=600) for store in remote], remote
    if kind == "async":
        return [Async(store) for store in remote], remote
    settings = {"workers": job["workers"], "weight": job["weight"] or None, "pace": job["pace"] or None}
    settings |= {"rounds": job["rounds"], "deadline": 600}
    return [Geo(store, every=int(kind.removeprefix("geo")), **settings) for store in remote], remote


class Share:
    """A corpus that another process has made, as train_ours wants it; in Sync every worker has as many batches."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.text = Encoded(Path(job["folder"]) / "text", {})
        self.vocabulary = Vocabulary.load(Path(job["folder"]) / "vocab.txt")
        self.sentences = job["sentences"]
        limit = int(job["mode"].partition(":")[2] or 0)
        if limit:
            self.sentences = min(self.sentences, int(np.searchsorted(self.text.starts, limit)))
        self._count = int(np.searchsorted(self.text.bounds(), self.sentences, "right") - 1) // job["workers"]

    def batches(self, rank: int, workers: int) -> Any:
        for number, batch in enumerate(self.text.batches(rank=rank, world_size=workers)):
            if number == self._count:
                return
            yield batch


def work(job: dict[str, Any]) -> None:
    share: Any = Share(job)
    stores, remote = open_mode(job["mode"], job)
    loop = new_loop(share, stores, shared=True, seed=job["seed"])
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    words = train_ours(share, loop, job["epochs"], rank=job["rank"], workers=job["workers"])
    for store in stores:
        store.close()
    print(time.perf_counter() - start, words, flush=True)
    sys.stdin.readline()
    for each in remote:
        each.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("model", "measure", "worker"))
    parser.add_argument("corpus")
    parser.add_argument("--words", type=int, default=0, help="of the corpus; 0: all")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 8, 26, 128])
    parser.add_argument("--modes", nargs="+", default=["sync", "async", "geo26"], help="sync, async, geoEVERY")
    parser.add_argument("--weight", type=float, default=0.0, help="of a difference; 0: 1 / workers")
    parser.add_argument("--pace", type=float, default=0.0, help="instead of a weight: a weight for each row")
    parser.add_argument("--rounds", action="store_true", help="of Geo: all workers exchange together")
    parser.add_argument("--wire", default="fp32", choices=list(ROWS), help="of Geo")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--similarity", default="")
    parser.add_argument("--job", default="{}", help="of a worker, as JSON")
    args = parser.parse_args()
    if args.what == "worker":
        work(json.loads(args.job))
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(args.corpus, folder, args.words)
        if args.what == "model":
            model(corpus, args.workers, args.mbit, args.every)
        else:
            measure(corpus, folder, args.similarity, args)


if __name__ == "__main__":
    main()
