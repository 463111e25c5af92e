"""A run of click prediction as data: what `plsc-ps train` reads from a recipe whose task is "ctr"."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plsc.data import CRITEO, Clicks, Columns, LibSVM, MultiSlot, Parquet
from plsc.data.click_formats import Format
from plsc.data.synthetic_clicks import SYNTHETIC, write_clicks
from plsc.models.clicks import CLICK_MODELS
from plsc.ps import RULES, Rule, Table
from plsc.ps.serving import DTYPES
from plsc.train.config import did_you_mean

KINDS = ("synthetic", "criteo", "columns", "libsvm", "multislot", "parquet")


@dataclass(frozen=True)
class CtrData:
    """Click logs. train, test: files or patterns; without test files, `test_share` of the lines is held out.

    kind: "synthetic" (made in OUT/data), "criteo", "columns" (text, columns by number from 0), "parquet" (by name),
    "libsvm", "multislot", or "module:attr", a format of your own.
    """

    kind: str = "criteo"
    train: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    test_share: float = 0.1
    label: str = "0"
    dense: tuple[str, ...] = ()  # columns of numbers: names, or numbers and ranges of them such as "1-13"
    sparse: tuple[str, ...] = ()
    delimiter: str = ","
    header: bool = False
    quote: str = ""
    clicked: str = "1"
    not_clicked: str = "0"
    num_slots: int = 0  # libsvm: most features of a line
    slots: tuple[str, ...] = ()  # multislot: "label", "dense:13", "ids", ... in the order of the line
    num_ids: int = 1  # multislot: most ids of a slot
    own_slots: bool = True  # a token has another id in every slot
    group: int = -1  # a slot whose (first) ids say within what the grouped AUC is taken (users); -1: none
    shuffle: int = 0  # rows mixed at a time
    readers: int = 1  # processes that parse
    ordered: bool = False  # with several readers: batches in the order of the files all the same
    num_train: int = 400_000  # synthetic
    num_test: int = 50_000  # synthetic


@dataclass(frozen=True)
class CtrModel:
    """name: logistic, wide_deep, deepfm, dcn, or "module:attr", called attr(sparse, num_slots=, num_dense=)."""

    name: str = "deepfm"
    factors: int = 16  # length of a feature's vector
    hidden: tuple[int, ...] = (256, 128)
    dropout: float = 0.0


@dataclass(frozen=True)
class CtrTable:
    """The sparse table; see plsc.ps.Table."""

    rule: str = "adagrad"
    rule_args: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.05
    init_scale: float = 0.01
    dtype: str = "fp32"
    stripes: int = 64
    locked: bool = False
    arena: str = ""
    admit_after: int = 1
    max_rows: int = 0  # 0: no bound


@dataclass(frozen=True)
class CtrDense:
    """Adam on the dense weights."""

    lr: float = 1e-3
    weight_decay: float = 0.0


@dataclass(frozen=True)
class CtrConfig:
    """A whole run."""

    task: str = "ctr"
    seed: int = 0
    epochs: int = 1
    max_steps: int = 0  # 0: no limit
    batch_size: int = 1024
    threads: int = 1  # that train one model at once, without locks on its weights
    log_every: int = 50  # steps
    save_every: int = 0  # steps; 0: after each epoch
    keep: int = 2  # checkpoints kept
    out: str = "runs/ctr"
    resume: bool = True
    export: bool = True
    export_dtype: str = "fp16"  # of the rows: fp32 | fp16 | int8
    data: CtrData = field(default_factory=CtrData)
    model: CtrModel = field(default_factory=CtrModel)
    table: CtrTable = field(default_factory=CtrTable)
    dense: CtrDense = field(default_factory=CtrDense)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "threads", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("max_steps", "save_every", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 0")
        if self.task != "ctr":
            raise ValueError(f"task is {self.task!r}, expected 'ctr'")
        for what, name, known in (
            ("data.kind", self.data.kind, KINDS),
            ("model.name", self.model.name, tuple(CLICK_MODELS)),
            ("table.rule", self.table.rule, tuple(RULES)),
        ):
            if name not in known and (":" not in name or what == "table.rule"):
                raise ValueError(f"{what} is {name!r}{did_you_mean(name, known)}; expected one of {', '.join(known)}")
        if self.data.kind != "synthetic" and not self.data.train:
            raise ValueError("data.train is empty, expected files of click logs or patterns such as day_*")
        if self.data.kind == "synthetic" and (self.data.train or self.data.test):
            raise ValueError("data.kind is 'synthetic', got files to read as well; say their kind")
        for what, number, fits, expected in (
            ("model.factors", self.model.factors, self.model.factors >= 1, "at least 1"),
            ("model.hidden", list(self.model.hidden), min(self.model.hidden, default=1) >= 1, "layers of at least 1"),
            ("model.dropout", self.model.dropout, 0 <= self.model.dropout < 1, "0 or more, less than 1"),
            ("dense.lr", self.dense.lr, 0 < self.dense.lr < math.inf, "a positive number"),
            ("dense.weight_decay", self.dense.weight_decay, 0 <= self.dense.weight_decay < math.inf, "0 or more"),
            ("export_dtype", self.export_dtype, self.export_dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        ):
            if not fits:
                raise ValueError(f"{what} is {number!r}, expected {expected}")


def open_clicks(config: CtrConfig) -> tuple[Clicks, Clicks]:
    """Readers of the training and the held-out part; synthetic data is written first."""
    data = config.data
    train, test = data.train, data.test
    if data.kind == "synthetic":
        folder = write_clicks(Path(config.out) / "data", num_train=data.num_train, num_test=data.num_test)
        train, test = (str(folder / "train-*.tsv"),), (str(folder / "test.tsv"),)
    for name, paths in (("data.train", train), ("data.test", test)):
        if folders := [path for path in paths if Path(path).is_dir()]:
            raise ValueError(f"{name} has {folders[0]}, a folder; expected files or patterns such as day_*")
    format, split = click_format(data), bool(test)
    if not -1 <= data.group < format.num_slots:
        raise ValueError(f"data.group is {data.group}, expected a slot, 0 to {format.num_slots - 1}, or -1 for none")
    return (
        Clicks(
            train,
            format,
            batch_size=config.batch_size,
            shuffle=data.shuffle,
            seed=config.seed,
            readers=data.readers,
            ordered=data.ordered,
            slots=data.own_slots,
            split="all" if split else "train",
            test_share=data.test_share,
        ),
        Clicks(
            test or train,
            format,
            batch_size=max(4096, config.batch_size),
            readers=data.readers,
            slots=data.own_slots,
            split="all" if split else "test",
            test_share=data.test_share,
        ),
    )


def click_format(data: CtrData) -> Format:
    if data.kind == "synthetic":
        return SYNTHETIC
    if data.kind == "criteo":
        return CRITEO
    if data.kind == "libsvm":
        return LibSVM(data.num_slots)
    if data.kind == "multislot":
        return MultiSlot([_slot(word) for word in data.slots], num_ids=data.num_ids, header=data.header)
    if data.kind == "parquet":
        return Parquet(label=data.label, dense=data.dense, sparse=data.sparse)
    if data.kind != "columns":
        return load_attr(data.kind, "data.kind")
    return Columns(
        label=_columns([data.label], "label")[0],
        dense=_columns(data.dense, "dense"),
        sparse=_columns(data.sparse, "sparse"),
        delimiter=data.delimiter,
        header=data.header,
        quote=data.quote,
        clicked=data.clicked,
        not_clicked=data.not_clicked,
    )


def make_table(config: CtrConfig) -> Table:
    """A new table for the run; rows hold a weight and, but for logistic regression, a vector."""
    given = config.table
    dim = 1 if config.model.name == "logistic" else 1 + config.model.factors
    return Table(
        dim,
        rule=make_rule(given),
        lr=given.lr,
        init_scale=given.init_scale,
        seed=config.seed,
        dtype=given.dtype,
        **table_options(given),
    )


def table_options(given: CtrTable) -> dict[str, Any]:
    """What a table that is made and one that is loaded have in common."""
    return {
        "stripes": given.stripes,
        "locked": given.locked,
        "arena": given.arena or None,
        "admit_after": given.admit_after,
        "max_rows": given.max_rows or None,
    }


def make_rule(given: CtrTable) -> Rule:
    try:
        return RULES[given.rule](**given.rule_args)
    except TypeError as error:
        raise ValueError(f"table.rule_args: {given.rule} does not take them ({error})") from None


def load_attr(name: str, what: str) -> Any:
    """The object that "module:attr" names."""
    module, _, attr = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attr)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what} {name!r} cannot be imported ({error}); expected module:attr") from error


def _slot(word: str) -> str | tuple[str, int]:
    name, colon, count = word.partition(":")
    if colon and not count.isdigit():
        raise ValueError(f"data.slots has {word!r}, expected label, ids or dense:13")
    return (name, int(count)) if colon else name


def _columns(words: tuple[str, ...] | list[str], what: str) -> list[int]:
    """Numbers and ranges of columns: "3", "1-13"."""
    columns: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"data.{what} has {word!r}, expected a column's number from 0 or a range such as 1-13")
        columns += range(int(first), int(last if dash else first) + 1)
    return columns
