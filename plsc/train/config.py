"""A run as data: frozen dataclasses, read from a TOML recipe, overridden by flags, saved beside the run's results."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from plsc.data.loader import POLICIES
from plsc.data.transforms import AUGMENTS
from plsc.ops.checks import checked
from plsc.ops.formats import PRODUCT_DTYPES, STATE_DTYPES, WEIGHT_DTYPES
from plsc.strategies import Strategy

RECIPES = "plsc.recipes"
OPTIMIZERS = ("sgd", "adamw", "lars")
SCHEDULES = ("polynomial", "cosine", "step", "constant")
T = TypeVar("T")


@dataclass(frozen=True)
class DataConfig:
    """What to train on.

    kind: "glyphs" (rendered from installed fonts), "folder" (path/NAME/*.jpg, or a .zip of it), "list" (a file of
    `path label` lines), "rec" (train.rec with train.idx), "tar" (WebDataset shards), "parquet", "lmdb", "synthetic", or
    "module:attr", called as attr(path, image_size=, channels=) for a Dataset.
    """

    kind: str = "folder"  # see above
    path: str = ""  # folder, file or pattern that it is read from
    root: str = ""  # folder that a list's relative paths start at; default: the list's own
    cache: str = ""  # rec, tar: a file to keep the index in; of millions of images it then opens in seconds
    image_size: int = 112  # pixels, square; others are scaled
    channels: int = 3  # 3: RGB, 1: grey
    num_classes: int = 0  # 0: as many as the data has
    workers: int = 1  # reading processes a rank
    on_bad_image: str = "redraw"  # another in its place, counted and logged; or "raise"
    per_class: int = 0  # K > 0: batches of classes with K images each, all classes equally often
    flip: bool = True  # mirror half of the images
    crop: int = 0  # random shift of up to this many pixels
    augment: str = "none"  # none | light | strong: colour, blur, low resolution, grey, erasing
    fonts: str = "matplotlib"  # glyphs: or "system", or a folder of fonts
    min_faces: int = 8  # glyphs: a character must stand in this many font faces
    held_out: float = 0.15  # glyphs: share of the characters kept for evaluation, never trained on
    num_samples: int = 10_000  # synthetic: images
    labels: str = "uniform"  # synthetic: how often a class comes, uniform | zipf


@dataclass(frozen=True)
class ModelConfig:
    """The backbone: a name of plsc.models, or "module:attr", called attr(embedding_size, image_size=, in_channels=)."""

    backbone: str = "iresnet50"  # see above
    embedding_size: int = 512  # numbers the backbone gives for an image
    weights: str = ""  # start from the backbone of this run or checkpoint


@dataclass(frozen=True)
class HeadConfig:
    """The classifier. margin: a name of plsc.nn.MARGINS, "module:Class", or "linear" for plain softmax with a bias."""

    margin: str = "arcface"  # see above
    margin_args: dict[str, Any] = field(default_factory=dict)  # arguments of the margin's class; replace the recipe's
    sample_rate: float = 1.0  # share of the classes in each step; those of the batch always take part
    sub_centers: int = 1  # centres a class
    filter_threshold: float | None = None  # leaves out other classes with a cosine above this
    fused: bool = False  # update sampled rows inside the backward, others stay untouched
    weight_dtype: str = "fp32"  # of a fused head, how its weight is kept: fp32 | split | bf16
    state_dtype: str = "fp32"  # and the momentum of sgd: fp32 | bf16 | int8
    unsampled: str = "still"  # and rows that were not sampled: still | decayed
    store: str = ""  # sampled classes are rows of: memory | file | file:FOLDER | servers as host:port,...
    cache_mb: float = 256.0  # MiB that save computing exponentials again in the backward
    cache_dtype: str = "fp32"  # exponentials kept for the backward: fp32 | bf16
    product_dtype: str = "auto"  # operands of matrix products: fp32 | bf16 | auto, on a GPU as weight_dtype has them
    extend_classes: bool = False  # on resume: more classes than the checkpoint has are allowed, new rows start fresh


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning rate. Norms and biases never decay."""

    name: str = "sgd"  # sgd | adamw | lars
    lr: float = 0.1  # the highest learning rate of the schedule
    momentum: float = 0.9  # sgd, lars
    nesterov: bool = False  # sgd
    weight_decay: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)  # adamw
    schedule: str = "polynomial"  # polynomial | cosine | step | constant
    warmup_epochs: float = 0.0  # from 0 up to lr
    power: float = 1.0  # polynomial: exponent
    milestones: tuple[float, ...] = ()  # step: epochs at which the rate falls
    gamma: float = 0.1  # step: factor of each fall
    final: float = 0.0  # polynomial, cosine: share of lr at the end


@dataclass(frozen=True)
class EvalConfig:
    """What to measure. task: "verification" (pairs), "classification" (top-1/top-5 of trained classes) or "none"."""

    task: str = "verification"  # see above
    kind: str = ""  # as data.kind, or "bin" (pairs in one file); empty: the training data's held-out part
    path: str = ""  # as data.path
    pairs: str = ""  # LFW-style pairs.txt; empty: pairs drawn from the labels
    sets: tuple[str, ...] = ()  # further ones, each measured by its name: X.bin (or a pattern), or DATA=PAIRS.txt
    num_pairs: int = 6000  # drawn where no list is given
    folds: int = 10  # of the pairs; the accuracy is the mean over them
    batch_size: int = 128  # a rank
    flip: bool = True  # add the embedding of the mirrored image (mean_norm is then of the sums)
    every: int = 0  # epochs between evaluations; 0: at the end only


@dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = 0  # of weights, sample order and augmentation
    epochs: int = 20
    max_steps: int = 0  # the run and its learning rates end there at the latest; 0: no limit
    batch_size: int = 128  # of one optimizer step, over all ranks
    log_every: int = 20  # steps between two lines
    save_every: int = 0  # steps between two checkpoints; 0: one an epoch
    keep: int = 3  # checkpoints kept
    out: str = "runs/run"  # where everything is written
    resume: bool = True  # continue from the newest checkpoint in `out`, if there is one
    nproc: int = 1  # ranks started on this machine
    timeout: float = 600.0  # seconds a rank waits for the others before the run stops
    max_restarts: int = 0  # times that the ranks of nproc begin again from the newest checkpoint when one is lost
    check: bool = False  # look at ranks, links, clocks, versions, config and data, say what is wrong, and end
    plan: str = ""  # say which classes fit, how and how fast, and end: here (--plan alone), or on 8x32GB, 8xH200, ...
    export: bool = True  # ONNX, class centres and embeddings at the end
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    strategy: Strategy = field(default_factory=Strategy)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        """What is wrong with a number by itself; what depends on data, ranks or classes is found where it is used."""
        _at_least(1, self, "batch_size", "log_every", "keep", "nproc")
        _at_least(0, self, "seed", "epochs", "max_steps", "save_every", "max_restarts")
        _at_least(1, self.data, "image_size", "channels", "num_samples", where="data.")
        _at_least(0, self.data, "num_classes", "workers", "crop", "held_out", "per_class", where="data.")
        _at_least(1, self.model, "embedding_size", where="model.")
        checked("head.sample_rate", self.head.sample_rate, 0.0, 1.0, hint="; 1 is the exact softmax")
        _at_least(0, self.head, "cache_mb", where="head.")
        _at_least(1, self.head, "sub_centers", where="head.")
        _at_least(0, self.optim, "lr", "weight_decay", "warmup_epochs", where="optim.")
        checked("optim.momentum", self.optim.momentum, 0.0, 1.0, open_high=True)
        for number, beta in enumerate(self.optim.betas):
            checked(f"optim.betas[{number}]", beta, 0.0, 1.0, open_high=True)
        _at_least(1, self.eval, "num_pairs", "batch_size", where="eval.")
        _at_least(2, self.eval, "folds", where="eval.")
        _at_least(0, self.eval, "every", where="eval.")
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}, expected seconds, more than 0")
        if not self.out:
            raise ValueError("out is empty, expected the folder to write into")
        _one_of("data.augment", self.data.augment, tuple(AUGMENTS))
        _one_of("data.on_bad_image", self.data.on_bad_image, POLICIES)
        _one_of("head.weight_dtype", self.head.weight_dtype, WEIGHT_DTYPES)
        _one_of("head.state_dtype", self.head.state_dtype, STATE_DTYPES)
        _one_of("head.unsampled", self.head.unsampled, ("still", "decayed"))
        _one_of("head.cache_dtype", self.head.cache_dtype, ("fp32", "bf16"))
        _one_of("head.product_dtype", self.head.product_dtype, PRODUCT_DTYPES)
        _one_of("optim.name", self.optim.name, OPTIMIZERS)
        _one_of("optim.schedule", self.optim.schedule, SCHEDULES)
        _one_of("eval.task", self.eval.task, ("verification", "classification", "none"))


def list_recipes(tasks: Collection[str] = ("",)) -> list[str]:
    """Names of the shipped recipes with one of these tasks; "": class-parallel training, whose recipes name none."""
    files = (entry for entry in resources.files(RECIPES).iterdir() if entry.name.endswith(".toml"))
    texts = {entry.name[:-5]: entry.read_text(encoding="utf-8") for entry in files}
    return sorted(name for name, text in texts.items() if tomllib.loads(text).get("task", "") in tasks)


def load_recipe(recipe: str) -> Config:
    """A Config from a shipped recipe's name or the path of a TOML file."""
    return from_dict(Config, read_recipe(recipe), where=f"recipe {recipe}")


def read_recipe(recipe: str, tasks: Collection[str] = ("",)) -> dict[str, Any]:
    """What the shipped recipe of that name (with one of these tasks) or a TOML file says."""
    path = Path(recipe)
    if path.is_file():
        source: Traversable = path
    elif recipe in list_recipes(tasks):
        source = resources.files(RECIPES).joinpath(f"{recipe}.toml")
    else:
        raise ValueError(_no_recipe(path, tasks))
    try:
        return tomllib.loads(source.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not TOML
        raise ValueError(f"recipe {recipe} is not valid TOML: {error}") from error


def _no_recipe(path: Path, tasks: Collection[str]) -> str:
    shipped = list_recipes(tasks)
    beside = [str(file) for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    what = f"recipe file {path} does not exist" if path.suffix == ".toml" else f"no recipe {str(path)!r}"
    if path.is_dir():
        own = path / "config.toml"
        what = f"{path} is a folder" + (f"; the recipe of this run is {own}" if own.is_file() else "")
        return f"{what}; expected a TOML file or a shipped recipe: {', '.join(shipped)}"
    hint = did_you_mean(str(path), beside) or did_you_mean(path.stem, shipped)
    return f"{what}{hint}; expected a TOML file or a shipped recipe: {', '.join(shipped)}"


def from_dict(cls: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """Builds a config dataclass from nested tables; unknown keys and wrong types are errors that name the key."""
    types = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    made = {}
    for key, value in values.items():
        if key not in names:
            raise ValueError(f"{where}: unknown key {key!r}{did_you_mean(key, names)}; known: {', '.join(names)}")
        made[key] = _convert(types[key], value, f"{where}: {key}", where)
    try:
        return cls(**made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, None left out (TOML has none)."""
    made: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            made[f.name] = to_dict(value)
        elif value is not None:
            made[f.name] = list(value) if isinstance(value, tuple) else value
    return made


def dump(config: Config) -> str:
    """The whole resolved run as TOML that load_recipe reads back to an equal Config."""
    return tomli_w.dumps(to_dict(config))


def _convert(kind: Any, value: Any, name: str, where: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is {value!r}, expected a table")
        return from_dict(kind, value, where=f"{where} [{name.rpartition(' ')[2]}]")
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in args:
        kind, origin = args[0], None
    if origin is tuple:
        if not isinstance(value, list) or (args[-1] is not ... and len(value) != len(args)):
            expected = "a list" if args[-1] is ... else f"a list of {len(args)}"
            raise ValueError(f"{name} is {value!r}, expected {expected}")
        return tuple(_convert(args[0], entry, name, where) for entry in value)
    if origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{name} is {value!r}, expected a list")
        return [_convert(args[0], entry, name, where) for entry in value]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is {value!r}, expected a table")
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is {value!r}, expected {kind.__name__}")
    return value


def did_you_mean(name: str, known: typing.Sequence[str]) -> str:
    """A suggestion to append to an error, empty when nothing known is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _at_least(least: int, config: Any, *names: str, where: str = "") -> None:
    for name in names:
        value = getattr(config, name)
        if not least <= value < math.inf:
            raise ValueError(f"{where}{name} is {value}, expected at least {least}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}{did_you_mean(value, known)}; expected one of {', '.join(known)}")
