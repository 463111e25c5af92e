"""A run of word vectors as data: what `plsc-ps train` reads from a recipe whose task is "word2vec"."""

import os
from dataclasses import dataclass, field
from typing import Any

from plsc.comm import Communicator
from plsc.data.text import SENTENCES, TOKENS
from plsc.ps import Host, Seat, Store, Table
from plsc.ps.choose import MODES, REMOTE_ARGS, check_mode, open_store
from plsc.train.config import did_you_mean

TABLES = ("words", "contexts")
FORMATS = ("binary", "text")


@dataclass(frozen=True)
class TextData:
    """Plain text; see plsc.data.text.Text. Without files in `train` a text of known structure is made in OUT/data.

    similarity: files of `word word score`. analogies: files of `a b c d` (questions-words.txt).
    """

    train: tuple[str, ...] = ()
    sentence: str = "line"  # or "paragraph", which ends at an empty line
    tokens: str = "letters"  # or "spaces"
    lower: bool = True
    readers: int = 1  # processes that parse, once
    min_count: int = 5
    max_words: int = 0  # 0: no bound
    vocabulary: str = ""  # a vocab.txt of an earlier run instead of counting; servers' rows go by its order
    similarity: tuple[str, ...] = ()
    analogies: tuple[str, ...] = ()
    num_sentences: int = 60_000  # of the text that is made


@dataclass(frozen=True)
class SkipGramModel:
    """Skip-gram with negative sampling; see plsc.ps.WordLoop."""

    dim: int = 100
    window: int = 5
    negatives: int = 5
    shared: bool = False  # one draw of negatives for all pairs of a centre word: faster, about as good
    sample: float = 1e-3  # 0: no sub-sampling
    power: float = 0.75  # negatives are drawn by count ** power
    lr: float = 0.025
    least_lr: float = 1e-4  # it falls to this in a straight line


@dataclass(frozen=True)
class Word2VecConfig:
    """A whole run. ps: "" for tables of this process, or the mode in which `servers` are trained (see docs/ps.md)."""

    task: str = "word2vec"
    seed: int = 0
    epochs: int = 5
    batch_words: int = 10_000  # that a thread trains at a time; in modes: a pull and a push
    threads: int = 1
    ps: str = ""
    servers: tuple[str, ...] = ()  # default: PLSC_PS_SERVERS
    ps_args: dict[str, Any] = field(default_factory=dict)
    log_every: int = 20  # batches
    out: str = "runs/word2vec"
    resume: bool = True  # tables of this process: from the last epoch
    formats: tuple[str, ...] = FORMATS
    data: TextData = field(default_factory=TextData)
    model: SkipGramModel = field(default_factory=SkipGramModel)

    def __post_init__(self) -> None:
        if self.task != "word2vec":
            raise ValueError(f"task is {self.task!r}, expected 'word2vec'")
        model, data = self.model, self.data
        for name, value in (
            ("epochs", self.epochs),
            ("batch_words", self.batch_words),
            ("threads", self.threads),
            ("log_every", self.log_every),
            ("model.dim", model.dim),
            ("model.window", model.window),
            ("model.negatives", model.negatives),
            ("data.min_count", data.min_count),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        for what, word, known in (
            ("data.sentence", data.sentence, SENTENCES),
            ("data.tokens", data.tokens, TOKENS),
            *(("formats", word, FORMATS) for word in self.formats),
        ):
            if word not in known:
                raise ValueError(f"{what} is {word!r}{did_you_mean(word, known)}; expected one of {', '.join(known)}")
        if not 0 <= model.least_lr <= model.lr or model.lr <= 0:
            raise ValueError(f"got lr {model.lr}, least_lr {model.least_lr}; expected 0 <= least_lr <= lr, and lr > 0")
        if self.seed < 0 or model.sample < 0:
            raise ValueError(f"got seed {self.seed}, sample {model.sample}; expected at least 0")
        if self.ps:
            check_mode(self.ps, self.ps_args)
        elif self.servers or self.ps_args:
            raise ValueError(f"got servers or ps_args and no mode; give ps, one of {', '.join(MODES)}")
        if self.ps == "sync" and self.threads > 1:
            raise ValueError(f"ps is sync and threads {self.threads}: a worker's rounds come one by one, use threads 1")


def open_stores(config: Word2VecConfig, comm: Communicator) -> tuple[Store, Store]:
    """Words' and contexts' rows: tables of this process, or what the mode makes of the servers'."""
    servers = config.servers or tuple(filter(None, os.environ.get("PLSC_PS_SERVERS", "").split(",")))
    if comm.world_size > 1 and not (config.ps and servers):
        raise ValueError(f"got {comm.world_size} workers, expected ps (a mode) and servers that they share")
    if not config.ps:
        inputs, outputs = (make_table(config, name, locked=False) for name in TABLES)
        return inputs, outputs
    stores = []
    for name in TABLES:
        if servers:
            store = open_store(
                name,
                dim=config.model.dim,
                mode=config.ps,
                servers=servers,
                args=config.ps_args,
                rank=comm.rank,
                workers=comm.world_size,
                rule="sgd",
            )
        else:
            args = {key: value for key, value in config.ps_args.items() if key not in REMOTE_ARGS}
            if config.ps == "sync":
                args.setdefault("workers", 1)
            store = MODES[config.ps](Seat(Host(make_table(config, name, locked=True), name=name)), **args)
        stores.append(store)
    return stores[0], stores[1]


def make_table(config: Word2VecConfig, name: str, *, locked: bool) -> Table:
    """A new table; words start uniform on +-1 / dim (as in gensim; half of it scores lower), contexts as zeros."""
    dim = config.model.dim
    init = "uniform" if name == TABLES[0] else "zeros"
    return Table(dim, rule="sgd", lr=1.0, init=init, init_scale=1.0 / dim, seed=config.seed, locked=locked)
