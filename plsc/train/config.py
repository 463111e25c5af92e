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
from plsc.fleet import Strategy

RECIPES = "plsc.recipes"
OPTIMIZERS = ("sgd", "adamw", "lars")
SCHEDULES = ("polynomial", "cosine", "step", "constant")
T = TypeVar("T")


@dataclass(frozen=True)
class DataConfig:
    """What to train on.

    kind: "glyphs" (rendered from installed fonts), "folder" (path/NAME/*.jpg, or a .zip of it), "list" (a file of
    `path label` lines), "rec" (train.rec with train.idx), "tar" (WebDataset shards), "parquet", "synthetic", or
    "module:attr", called as attr(path, image_size=, channels=) for a Dataset.
    """

    kind: str = "folder"
    path: str = ""
    root: str = ""  # folder that a list's relative paths start at; default: the list's own
    image_size: int = 112
    channels: int = 3
    num_classes: int = 0  # 0: as many as the data has
    workers: int = 1  # reading processes a rank
    on_bad_image: str = "redraw"  # another in its place, counted and logged; or "raise"
    flip: bool = True
    crop: int = 0  # random shift of up to this many pixels
    augment: str = "none"  # none | light | strong: colour, blur, low resolution, grey, erasing
    fonts: str = "matplotlib"  # glyphs: or "system", or a folder of fonts
    min_faces: int = 8  # glyphs: a character must stand in this many font faces
    held_out: float = 0.15  # glyphs: share of the characters kept for evaluation, never trained on
    num_samples: int = 10_000  # synthetic
    labels: str = "uniform"  # synthetic: or "zipf"


@dataclass(frozen=True)
class ModelConfig:
    """The backbone: a name of plsc.models, or "module:attr", called attr(embedding_size, image_size=, in_channels=)."""

    backbone: str = "iresnet50"
    embedding_size: int = 512
    weights: str = ""  # start from the backbone of this run or checkpoint


@dataclass(frozen=True)
class HeadConfig:
    """The classifier. margin: a name of plsc.nn.MARGINS, "module:Class", or "linear" for plain softmax with a bias."""

    margin: str = "arcface"
    margin_args: dict[str, Any] = field(default_factory=dict)  # arguments of the margin's class; replace the recipe's
    sample_rate: float = 1.0
    sub_centers: int = 1
    filter_threshold: float | None = None
    fused: bool = False  # update sampled rows inside the backward, others stay untouched
    cache_mb: float = 256.0
    extend_classes: bool = False  # on resume: more classes than the checkpoint has are allowed, new rows start fresh


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning rate. Norms and biases never decay."""

    name: str = "sgd"  # sgd | adamw | lars
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: str = "polynomial"  # polynomial | cosine | step | constant
    warmup_epochs: float = 0.0
    power: float = 1.0
    milestones: tuple[float, ...] = ()  # epochs
    gamma: float = 0.1
    final: float = 0.0


@dataclass(frozen=True)
class EvalConfig:
    """What to measure. task: "verification" (pairs), "classification" (top-1/top-5 of trained classes) or "none"."""

    task: str = "verification"
    kind: str = ""  # as data.kind, or "bin" (pairs in one file); empty: the training data's held-out part
    path: str = ""
    pairs: str = ""  # LFW-style pairs.txt; empty: pairs drawn from the labels
    num_pairs: int = 6000
    folds: int = 10
    batch_size: int = 128
    flip: bool = True
    every: int = 0  # epochs between evaluations; 0: at the end only


@dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = 0
    epochs: int = 20
    max_steps: int = 0  # 0: no limit
    batch_size: int = 128  # of one optimizer step, over all ranks
    log_every: int = 20  # steps
    save_every: int = 0  # steps; 0: once an epoch
    keep: int = 3  # checkpoints kept
    out: str = "runs/run"  # where everything is written
    resume: bool = True  # continue from the newest checkpoint in `out`, if there is one
    nproc: int = 1  # ranks started on this machine
    timeout: float = 600.0  # seconds a rank waits for the others before the run stops
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
        _at_least(0, self, "seed", "epochs", "max_steps", "save_every")
        _at_least(1, self.data, "image_size", "channels", "num_samples", where="data.")
        _at_least(0, self.data, "num_classes", "workers", "crop", "held_out", where="data.")
        _at_least(1, self.model, "embedding_size", where="model.")
        _at_least(0, self.head, "sample_rate", "cache_mb", where="head.")
        _at_least(0, self.optim, "lr", "momentum", "weight_decay", "warmup_epochs", where="optim.")
        _at_least(1, self.eval, "num_pairs", "folds", "batch_size", where="eval.")
        _at_least(0, self.eval, "every", where="eval.")
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}, expected seconds, more than 0")
        if not self.out:
            raise ValueError("out is empty, expected the folder to write into")
        _one_of("data.augment", self.data.augment, tuple(AUGMENTS))
        _one_of("data.on_bad_image", self.data.on_bad_image, POLICIES)
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
