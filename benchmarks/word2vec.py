"""Skip-gram beside gensim: words a CPU-second of one thread, and word similarity with them.

    python benchmarks/word2vec.py speed CORPUS [--words 1000000] [--repeats 3]
    python benchmarks/word2vec.py quality CORPUS --similarity wordsim353.tsv [--epochs 3] [--seeds 1]
    python benchmarks/word2vec.py geo CORPUS --similarity wordsim353.tsv [--workers 4] [--every 8 26] [--epochs 3]
        [--weight 1 | --pace 0.0006] [--wire int8] [--seeds 5]
    python benchmarks/word2vec.py rounds CORPUS ...    # as geo

CORPUS: plain text, paragraphs as sentences, runs of letters in lower case; .gz and .dz too. gensim (pip install gensim)
gets the same sentences, as lists of words. All: dim 100, window 5, 5 negatives, sample 1e-3, min_count 5.

speed    the first so many words, one thread each, one after the other, repeated; words of the vocabulary, with those
         that sub-sampling drops, a processor-second. gensim's words are made into numbers by its own worker, which is
         what it does; ours are numbers in a file already, and what it took to make them is shown.
quality  the same number of epochs over all of CORPUS, one thread, Spearman's rank correlation beside each.
geo      workers as threads with a copy each, in this process, one server: Spearman against one worker's, and how many
         rows travel. No network: what this shows is what the mode costs in quality.
rounds   a pace in rounds without threads and servers: the same numbers every time. What is not sent is dropped, of a
         weight too.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.text import Encoded, Text, Vocabulary
from plsc.data.vectors import WordVectors
from plsc.ps import Geo, Server, Table, WordLoop, connect
from plsc.ps.geo import weights as row_weights
from plsc.ps.wire import LAYOUTS
from plsc.train.word_metrics import similarity

DIM, WINDOW, NEGATIVES, SAMPLE, MIN_COUNT, LR, LEAST_LR = 100, 5, 5, 1e-3, 5, 0.025, 1e-4


class Corpus:
    """A text as numbers, and as gensim reads it."""

    def __init__(self, path: str, folder: str, words: int = 0) -> None:
        start = time.process_time()
        text = Text(path, sentence="paragraph")
        self.vocabulary = Vocabulary(text.count(), min_count=MIN_COUNT)
        self.counted = time.process_time() - start
        self.text: Encoded = text.encode(self.vocabulary, Path(folder) / "text")
        self.encoded = time.process_time() - start - self.counted
        starts = self.text.starts
        self.sentences = len(starts) - 1 if not words else int(np.searchsorted(starts, words))
        self.words = int(starts[self.sentences])
        print(
            f"{self.words} words, {self.sentences} sentences, vocabulary {len(self.vocabulary)}; "
            f"CPU-seconds for all of it: counted {self.counted:.1f}, made numbers {self.encoded:.1f}"
        )

    def batches(self, rank: int = 0, workers: int = 1) -> Iterator[Any]:
        for batch in self.text.batches(rank=rank, world_size=workers):
            if batch.first + len(batch.starts) - 1 > self.sentences:
                return
            yield batch

    def __iter__(self) -> Iterator[list[str]]:
        words, starts = self.vocabulary.words, self.text.starts
        for s in range(self.sentences):
            yield [words[i] for i in self.text.tokens[starts[s] : starts[s + 1]]]


def new_tables(seed: int, **options: Any) -> list[Table]:
    return [
        Table(DIM, rule="sgd", lr=1.0, init=init, init_scale=1.0 / DIM, seed=seed, **options)
        for init in ("uniform", "zeros")
    ]


def new_loop(corpus: Corpus, stores: Any, *, shared: bool, seed: int) -> WordLoop:
    keep, weights = corpus.vocabulary.keep(SAMPLE), corpus.vocabulary.counts**0.75
    options: dict[str, Any] = {"window": WINDOW, "negatives": NEGATIVES, "shared": shared, "seed": seed}
    return WordLoop(*stores, keep=keep, weights=weights, **options)


def rate(done: float) -> float:
    return max(LEAST_LR, LR - (LR - LEAST_LR) * done)


def train_ours(corpus: Corpus, loop: WordLoop, epochs: int, *, rank: int = 0, workers: int = 1) -> int:
    """Words trained."""
    words = 0
    for epoch in range(epochs):
        for batch in corpus.batches(rank, workers):
            done = (epoch + batch.first / corpus.sentences) / epochs
            loop.train(batch.tokens, batch.starts, first=batch.first, epoch=epoch, lr=rate(done))
            words += len(batch.tokens)
    return words


def gensim_model(corpus: Corpus, sentences: list[list[str]], seed: int) -> Any:
    try:
        from gensim.models import Word2Vec
    except ImportError:
        raise SystemExit("the peer is missing: pip install gensim") from None
    model = Word2Vec(
        vector_size=DIM,
        window=WINDOW,
        negative=NEGATIVES,
        sample=SAMPLE,
        min_count=1,
        sg=1,
        workers=1,
        seed=seed,
        alpha=LR,
        min_alpha=LEAST_LR,
    )
    counts = dict(zip(corpus.vocabulary.words, corpus.vocabulary.counts.tolist(), strict=True))
    model.build_vocab_from_freq(counts, corpus_count=len(sentences))
    return model


def train_gensim(model: Any, sentences: list[list[str]], epochs: int) -> None:
    model.train(sentences, total_examples=len(sentences), epochs=epochs)


def speed(corpus: Corpus, repeats: int) -> None:
    """Contenders take turns; the first turn warms up and is not counted."""
    sentences = list(corpus)
    rates: dict[str, list[float]] = {"gensim": [], "like for like": [], "shared": []}
    for turn in range(repeats + 1):
        for name, each in rates.items():
            if name == "gensim":
                model = gensim_model(corpus, sentences, turn)
                start, words = time.process_time(), corpus.words
                train_gensim(model, sentences, 1)
            else:
                loop = new_loop(corpus, new_tables(turn), shared=name == "shared", seed=turn)
                start = time.process_time()
                words = train_ours(corpus, loop, 1)
            if turn:
                each.append(words / (time.process_time() - start))
    print("\n| one thread | words a CPU-second: median | range | to gensim |\n|---|---|---|---|")
    for name, each in rates.items():
        ratio = statistics.median(x / g for x, g in zip(each, rates["gensim"], strict=True))
        print(f"| {name} | {statistics.median(each):,.0f} | {min(each):,.0f}-{max(each):,.0f} | {ratio:.2f} |")


def quality(corpus: Corpus, path: str, epochs: int, seeds: int, who: list[str]) -> None:
    sentences = list(corpus) if "gensim" in who else []
    print("\n| one thread | spearman of each seed | mean | words a CPU-second |\n|---|---|---|---|")
    for name in who:
        found, rates = [], []
        for seed in range(seeds):
            if name == "gensim":
                model = gensim_model(corpus, sentences, seed + 1)
                start = time.process_time()
                train_gensim(model, sentences, epochs)
                vectors = WordVectors(model.wv.index_to_key, model.wv.vectors)
            else:
                tables = new_tables(seed)
                loop = new_loop(corpus, tables, shared=name == "shared", seed=seed)
                start = time.process_time()
                train_ours(corpus, loop, epochs)
                vectors = vectors_of(corpus, tables[0])
            rates.append(epochs * corpus.words / (time.process_time() - start))
            found.append(similarity(vectors, path)["spearman"])
        each = ", ".join(f"{x:.3f}" for x in found)
        print(f"| {name} | {each} | {np.mean(found):.3f} | {statistics.median(rates):,.0f} |", flush=True)


def vectors_of(corpus: Corpus, table: Table) -> WordVectors:
    keys = np.arange(len(corpus.vocabulary), dtype=np.uint64)
    return WordVectors(corpus.vocabulary.words, table.pull(keys, create=False))


def geo(corpus: Corpus, args: argparse.Namespace) -> None:
    print(f"\n| workers | exchange every | weight | spearman of each seed | mean | rows sent a word |\n|{'---|' * 6}")

    def say(who: str, every: str, weight: str, found: list[float], rows: str) -> None:
        each = ", ".join(f"{x:.3f}" for x in found)
        print(f"| {who} | {every} | {weight} | {each} | {np.mean(found):.3f} | {rows} |", flush=True)

    def spearman(table: Table) -> float:
        return similarity(vectors_of(corpus, table), args.similarity)["spearman"]

    found = []
    for seed in range(args.seeds):
        tables = new_tables(seed)
        train_ours(corpus, new_loop(corpus, tables, shared=True, seed=seed), args.epochs)
        found.append(spearman(tables[0]))
    say("1, no mode", "", "", found, "")
    for every in args.every:
        for weight in args.pace or args.weight:
            settings = {"every": every, "workers": args.workers, "pace" if args.pace else "weight": weight or None}
            found, rows = [], 0.0
            for seed in range(args.seeds):
                table, sent = geo_once(corpus, settings, args, seed)
                found.append(spearman(table))
                rows = sent / (args.epochs * corpus.words)
            word = f"pace {weight}" if args.pace else f"{weight or 1 / args.workers}"
            say(f"{args.workers}, {args.wire}", f"{every} x 10,000 words", word, found, f"{rows:.3f}")


def geo_once(corpus: Corpus, settings: dict[str, Any], args: argparse.Namespace, seed: int) -> tuple[Table, int]:
    """The words' table after all workers' training, and how many rows travelled."""
    tables, sent = dict(zip(("words", "contexts"), new_tables(seed, locked=True), strict=True)), [0]
    with Server(tables) as server:

        def work(rank: int) -> None:
            remote = [connect(server.address, table=name, rank=rank, wire=args.wire) for name in tables]
            stores = [Geo(_Counted(store, sent), **settings) for store in remote]
            loop = new_loop(corpus, stores, shared=True, seed=seed)
            train_ours(corpus, loop, args.epochs, rank=rank, workers=args.workers)
            for each in (*stores, *remote):
                each.close()

        with ThreadPoolExecutor(args.workers) as pool:
            list(pool.map(work, range(args.workers)))
    return tables["words"], sent[0]


def rounds(corpus: Corpus, args: argparse.Namespace) -> None:
    print(f"\n| exchange every | weight | spearman of each seed | mean |\n|{'---|' * 4}")
    for every in args.every:
        for weight in args.pace or args.weight:
            found = [rounds_once(corpus, every, weight, args, seed) for seed in range(args.seeds)]
            each = ", ".join(f"{x:.3f}" for x in found)
            word = f"pace {weight}" if args.pace else f"{weight or 1 / args.workers}"
            print(f"| {every} x 10,000 words | {word} | {each} | {np.mean(found):.3f} |", flush=True)


def rounds_once(corpus: Corpus, every: int, weight: float, args: argparse.Namespace, seed: int) -> float:
    keys, wire = np.arange(len(corpus.vocabulary), dtype=np.uint64), LAYOUTS[args.wire]
    crew = [new_tables(seed) for _ in range(args.workers)]
    loops = [new_loop(corpus, tables, shared=True, seed=seed) for tables in crew]
    shared = [table.pull(keys) for table in crew[0]]
    base = [rows.copy() for rows in shared]
    batches = [(epoch, batch) for epoch in range(args.epochs) for batch in corpus.batches()]
    for start in range(0, len(batches), every * args.workers):
        steps = np.zeros((args.workers, 2, len(keys)))
        for number, (epoch, batch) in enumerate(batches[start : start + every * args.workers]):
            rank = number % args.workers
            lr = rate((epoch + batch.first / corpus.sentences) / args.epochs)
            loops[rank].train(batch.tokens, batch.starts, first=batch.first, epoch=epoch, lr=lr)
            steps[rank] += loops[rank].steps(batch.tokens)
        for side in range(2):
            for rank, tables in enumerate(crew):
                moved = tables[side].pull(keys) - base[side]
                each = row_weights(steps[rank, side], weight, args.workers)[:, None] if args.pace else None
                moved *= np.float32(weight or 1 / args.workers) if each is None else each
                shared[side] += wire.decode(wire.encode(moved), DIM)
            base[side] = wire.decode(wire.encode(shared[side]), DIM).copy()
            for tables in crew:
                tables[side].assign(keys, base[side])
    return similarity(WordVectors(corpus.vocabulary.words, shared[0]), args.similarity)["spearman"]


class _Counted:
    """A store that counts the rows of its exchanges, both ways."""

    def __init__(self, store: Any, sent: list[int]) -> None:
        self._store, self._sent = store, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def exchange(self, keys: np.ndarray, deltas: np.ndarray) -> Any:
        changes = self._store.exchange(keys, deltas)
        self._sent[0] += len(keys) + len(changes.keys)
        return changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "quality", "geo", "rounds"))
    parser.add_argument("corpus")
    parser.add_argument("--words", type=int, default=0, help="of the corpus; 0: all (speed: 1,000,000)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--similarity", default="")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--who", nargs="+", default=["gensim", "like for like", "shared"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=int, nargs="+", default=[8])
    parser.add_argument("--weight", type=float, nargs="+", default=[0.0], help="of a difference; 0: 1 / workers")
    parser.add_argument("--pace", type=float, nargs="+", default=[], help="instead: a weight for each row")
    parser.add_argument("--wire", default="fp32", choices=["fp32", "fp16", "int8"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = args.words or (1_000_000 if args.what == "speed" else 0)
        corpus = Corpus(args.corpus, folder, words)
        if args.what == "speed":
            speed(corpus, args.repeats)
        elif not args.similarity:
            parser.error("--similarity is missing: a file of `word word score` lines")
        elif args.what == "quality":
            quality(corpus, args.similarity, args.epochs, args.seeds, args.who)
        else:
            (geo if args.what == "geo" else rounds)(corpus, args)


if __name__ == "__main__":
    main()
