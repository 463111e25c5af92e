"""Word vectors: threads that train two tables of rows on a text, here or on servers, and what becomes of them."""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tomli_w

from plsc.comm import Communicator, LocalCommunicator
from plsc.data.synthetic_text import write_text
from plsc.data.text import Encoded, Sentences, Text, Vocabulary
from plsc.data.vectors import WordVectors
from plsc.ps import Geo, Store, Sync, Table, WordLoop
from plsc.ps.words import Trained
from plsc.train.build import Progress
from plsc.train.config import to_dict
from plsc.train.metrics_log import MetricsLog
from plsc.train.plots import plot_loss, read_records
from plsc.train.word2vec_config import TABLES, Word2VecConfig, open_stores
from plsc.train.word_metrics import analogies, similarity

logger = logging.getLogger(__name__)

PULLED = 65_536  # rows at a time, when vectors are taken out


class WordTrainer:
    """Text, vocabulary, stores and place of a run; as one of `comm`'s workers it trains its share of the batches."""

    def __init__(
        self,
        config: Word2VecConfig,
        *,
        comm: Communicator | None = None,
        stores: tuple[Store, Store] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.comm = LocalCommunicator() if comm is None else comm
        self.out = Path(config.out)
        self.vocabulary, self.text = self._read()
        self.epoch = self.step = 0
        self.stores = open_stores(config, self.comm) if stores is None else stores
        self._progress = progress
        self._log = MetricsLog(self.out)
        self._lock = threading.Lock()
        if config.resume:
            self._restore()
        model = config.model
        self.loop = WordLoop(
            *self.stores,
            keep=self.vocabulary.keep(model.sample),
            weights=self.vocabulary.counts.astype(np.float64) ** model.power,
            window=model.window,
            negatives=model.negatives,
            shared=model.shared,
            seed=config.seed,
        )
        self._per_epoch = len(self.text.bounds(config.batch_words)) - 1

    def fit(self) -> WordVectors:
        """Trains all epochs; the vectors of the words, which rank 0 alone is given whole."""
        if self.comm.rank == 0:
            self._log.open(self.step)
        try:
            with ThreadPoolExecutor(self.config.threads, thread_name_prefix="train") as pool:
                while self.epoch < self.config.epochs:
                    self._train_epoch(pool)
                    self.epoch += 1
                    self._save()
        finally:
            self._log.close()
        for store in self.stores:
            if not isinstance(store, Table):
                store.flush()  # type: ignore[attr-defined]
        self.comm.barrier()
        return self.vectors()

    def vectors(self) -> WordVectors:
        """What the store holds now; of a Geo, the servers' rows."""
        store: Store = self.stores[0]
        source: Store = getattr(store, "store", store)
        keys = np.arange(len(self.vocabulary), dtype=np.uint64)
        parts = [source.pull(keys[start : start + PULLED], create=False) for start in range(0, len(keys), PULLED)]
        return WordVectors(self.vocabulary.words, np.concatenate(parts))

    def lr_of(self, number: int) -> float:
        """The rate for a batch of the current epoch: it depends on the place in the text alone."""
        model = self.config.model
        done = (self.epoch + number / self._per_epoch) / self.config.epochs
        return max(model.least_lr, model.lr - (model.lr - model.least_lr) * done)

    # ---- inside

    def _read(self) -> tuple[Vocabulary, Encoded]:
        data, rank = self.config.data, self.comm.rank
        # Workers may share the folder: each has files of its own.
        folder = self.out / ("text" if rank == 0 else f"text-{rank}")
        files = data.train
        if not files:
            made = write_text(self.out / "data" if rank == 0 else folder, num_sentences=data.num_sentences)
            files = (str(made / "text.txt"),)
        text = Text(
            files, sentence=data.sentence, tokens=data.tokens, lower=data.lower, readers=data.readers, ordered=True
        )
        if data.vocabulary:
            vocabulary = Vocabulary.load(data.vocabulary)
        else:
            vocabulary = Vocabulary(text.count(), min_count=data.min_count, max_words=data.max_words)
        encoded = text.encode(vocabulary, folder)
        if rank == 0:
            vocabulary.save(self.out / "vocab.txt")
            said = (
                f"{len(vocabulary)} words, {len(encoded.tokens)} of the text's {vocabulary.counts.sum()} in sentences"
            )
            logger.info("vocabulary: %s; %d malformed lines", said, text.malformed)
        return vocabulary, encoded

    def _train_epoch(self, pool: ThreadPoolExecutor) -> None:
        batches = self._batches()
        window, since = Trained(), time.perf_counter()
        words = 0
        failed = threading.Event()

        def work() -> None:
            nonlocal window, since, words
            try:
                while not failed.is_set():
                    with self._lock:
                        batch = next(batches, None)
                        if batch is None:
                            return
                        lr = self.lr_of(batch.number)
                    done = self.loop.train(batch.tokens, batch.starts, first=batch.first, epoch=self.epoch, lr=lr)
                    with self._lock:
                        self.step += 1
                        window += done
                        words += len(batch.tokens)
                        if self.step % self.config.log_every == 0:
                            self._report(window, words, time.perf_counter() - since, lr)
                            window, words, since = Trained(), 0, time.perf_counter()
            except BaseException:
                failed.set()
                raise

        for future in [pool.submit(work) for _ in range(self.config.threads)]:
            future.result()

    def _batches(self) -> Iterator[Sentences]:
        """This worker's batches; where workers go in rounds as many for each, the last of some empty."""
        rank, workers = self.comm.rank, self.comm.world_size
        yield from self.text.batches(words=self.config.batch_words, rank=rank, world_size=workers)
        store = self.stores[0]
        rounds = isinstance(store, Sync) or (isinstance(store, Geo) and store.rounds)
        if rounds and rank >= self._per_epoch % workers > 0:
            yield Sentences(np.empty(0, np.int32), np.zeros(1, np.int64), 0, self._per_epoch)

    def _report(self, window: Trained, words: int, seconds: float, lr: float) -> None:
        if self.comm.rank:
            return
        steps = self._per_epoch / self.comm.world_size
        record = {
            "step": self.step,
            "epoch": self.step / steps,
            "loss": window.loss / max(window.sampled, 1),
            "lr": lr,
            "words_per_second": words / seconds,
        }
        self._log.write(record)
        if self._progress is not None:
            total = max(self.step, round(steps * self.config.epochs))
            self._progress(self.step, total)

    def _save(self) -> None:
        """The tables of this process after an epoch: a folder that appears whole or not at all."""
        if not all(isinstance(store, Table) for store in self.stores):
            return
        place, partial = self.out / "tables", self.out / "tables.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for store, name in zip(self.stores, TABLES, strict=True):
            assert isinstance(store, Table)
            store.save(partial / f"{name}.table")
        self.vocabulary.save(partial / "vocab.txt")
        (partial / "state.json").write_text(json.dumps({"epoch": self.epoch, "step": self.step}), encoding="utf-8")
        old = self.out / "tables.old"
        if place.exists():
            os.replace(place, old)
        os.replace(partial, place)
        shutil.rmtree(old, ignore_errors=True)

    def _restore(self) -> None:
        place = self.out / "tables"
        if not place.exists() and (self.out / "tables.old").exists():
            place = self.out / "tables.old"  # it ended between two renames
        if not (place / "state.json").is_file() or not all(isinstance(store, Table) for store in self.stores):
            return
        tables = [Table.load(place / f"{name}.table") for name in TABLES]
        words = Vocabulary.load(place / "vocab.txt").words
        if words != self.vocabulary.words or any(table.dim != self.config.model.dim for table in tables):
            raise ValueError(f"{place} holds {len(words)} words of {tables[0].dim}; give another out, or --no-resume")
        self.stores = (tables[0], tables[1])
        state = json.loads((place / "state.json").read_text(encoding="utf-8"))
        self.epoch, self.step = state["epoch"], state["step"]
        logger.info("continuing after epoch %d", self.epoch)


def train(
    config: Word2VecConfig, *, comm: Communicator | None = None, progress: Progress | None = None
) -> dict[str, float]:
    """A run from start to end; writes config.toml, metrics, vocab.txt, vectors, result.json and loss.png."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    trainer = WordTrainer(config, comm=comm, progress=progress)
    vectors = trainer.fit()
    result: dict[str, float] = {}
    if trainer.comm.rank == 0:
        (out / "config.toml").write_text(tomli_w.dumps(to_dict(config)), encoding="utf-8")
        for word, name in (("binary", "vectors.bin"), ("text", "vectors.txt")):
            if word in config.formats:
                vectors.save(out / name)
        result = evaluate(config, vectors)
        text = json.dumps({"step": trainer.step, "words": len(vectors), **result}, indent=2)
        (out / "result.json").write_text(text + "\n", encoding="utf-8")
        records = [record for record in read_records(out / "metrics.jsonl") if "loss" in record]
        if records:
            plot_loss(records, out / "loss.png")
    for store in trainer.stores:
        if not isinstance(store, Table):
            store.close()  # type: ignore[attr-defined]
    trainer.comm.barrier()  # no worker goes, and its servers with it, while another still reads
    return result


def evaluate(config: Word2VecConfig, vectors: WordVectors) -> dict[str, float]:
    """spearman and analogies of the files that the recipe names, or of the text that was made."""
    data, made = config.data, Path(config.out) / "data"
    similar, questions = data.similarity, data.analogies
    if not data.train:
        similar, questions = (str(made / "similarity.tsv"),), (str(made / "analogies.txt"),)
    result: dict[str, float] = {}
    for i, (measure, file) in enumerate([*((similarity, f) for f in similar), *((analogies, f) for f in questions)]):
        found = measure(vectors, file)
        for what, value in found.items():
            name = f"{measure.__name__}_{what}"
            result[name if name not in result else f"{name}_{i}"] = value
    return result
