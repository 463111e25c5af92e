"""What a config asks for, built: data sets, evaluation sets, backbone, head, optimizer, schedule."""

from __future__ import annotations

import glob
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from plsc.comm import Communicator
from plsc.data import (
    AUGMENTS,
    Augment,
    Dataset,
    Glyphs,
    ImageFolder,
    ImageList,
    LMDBImages,
    Pairs,
    ParquetImages,
    RecordIO,
    Synthetic,
    TarShards,
    VerificationSet,
    make_pairs,
    open_images,
    read_pairs,
)
from plsc.data.convert import content_kind, kind_of
from plsc.models import build as build_model
from plsc.models.zoo import check_call
from plsc.nn import MARGINS, ClassParallelHead, ClassParallelLinear, Margin
from plsc.ops import LARS, SGD, AdamW, RowOptimizer
from plsc.strategies import Schedule, build_optimizer, param_groups
from plsc.train.class_store import build_store
from plsc.train.config import Config, DataConfig, HeadConfig, OptimConfig, did_you_mean
from plsc.train.failures import opening

Head = ClassParallelHead | ClassParallelLinear
Progress = Callable[[int, int], None]
FILES = ("folder", "list", "rec", "tar", "parquet", "lmdb")  # kinds that are read from a path
MADE = ("glyphs", "synthetic")
KINDS = (*FILES, *MADE)


def build_data(
    config: DataConfig, *, seed: int, split: str = "train", progress: Progress | None = None, key: str = "data"
) -> Dataset:
    """The data set a config names. split: "train", or "test" for the classes that glyphs keep for evaluation.

    key: the table of the recipe that errors name.
    """
    if config.kind in FILES and not config.path:
        raise ValueError(f"{key}.path is not given; {key}.kind {config.kind!r} reads from one, pass --{key}.path PATH")
    if config.kind in MADE and config.path:
        raise ValueError(
            f"{key}.path is {config.path!r}, but {key}.kind {config.kind!r} reads from none; say what is there: "
            f"--{key}.kind {' | '.join(FILES)}"
        )
    with _of_kind(key, config.kind, config.path):
        return _open_data(config, seed=seed, split=split, progress=progress, key=key)


@contextmanager
def _of_kind(key: str, kind: str, path: str) -> Iterator[None]:
    """As `opening`; where the path is evidently of another kind, the error says which."""
    try:
        with opening(f"{key}.path", path):
            yield
    except ValueError as error:
        found = _evident_kind(path)
        if kind not in (*FILES, "bin") or found in ("", kind):
            raise
        fits = f"--{key}.kind {found}"
        if key == "data" and found == "bin":
            fits = "--eval.kind bin with --eval.path, for it holds pairs and no classes"
        raise ValueError(
            f"{key}.path is {path!r}, which looks like kind {found!r}, but {key}.kind is {kind!r}; expected {fits} "
            f"(as {kind!r}: {error})"
        ) from error


def _evident_kind(path: str) -> str:
    """What a path's content or name says it is; "" where they do not tell."""
    if os.path.isdir(path):
        found = kind_of(path)
        return found if found != "folder" or any(entry.is_dir() for entry in os.scandir(path)) else ""
    if not os.path.exists(path) and not set(path) & set("*?[{"):
        return ""
    named = "folder" if path.lower().endswith(".zip") else kind_of(path).replace("folder", "")
    return content_kind(path) or named


def _open_data(config: DataConfig, *, seed: int, split: str, progress: Progress | None, key: str) -> Dataset:
    size, channels = config.image_size, config.channels
    data: Dataset
    if config.kind == "glyphs":
        data = Glyphs(
            image_size=size,
            channels=channels,
            fonts=config.fonts,
            min_faces=config.min_faces,
            split=split,
            test_share=config.held_out,
            seed=seed,
            progress=progress,
        )
    elif config.kind == "folder":
        data = ImageFolder(config.path, image_size=size, channels=channels)
    elif config.kind == "list":
        classes = config.num_classes or None
        root = config.root or None
        Path(config.path).stat()  # before the folder it would lie in is looked for
        data = ImageList(config.path, root=root, image_size=size, channels=channels, num_classes=classes)
    elif config.kind == "rec":
        data = RecordIO(config.path, image_size=size, channels=channels, cache=config.cache or None)
    elif config.kind == "tar":
        data = TarShards(config.path, image_size=size, channels=channels, cache=config.cache or None)
    elif config.kind == "parquet":
        data = ParquetImages(config.path, image_size=size, channels=channels)
    elif config.kind == "lmdb":
        data = LMDBImages(config.path, image_size=size, channels=channels)
    elif config.kind == "synthetic":
        classes = config.num_classes or 1000
        data = Synthetic(
            config.num_samples, classes, image_size=size, channels=channels, labels=config.labels, seed=seed
        )
    elif ":" in config.kind:
        make = import_attr(config.kind, f"{key}.kind")
        check_call(make, f"{key}.kind {config.kind!r}", config.path, image_size=size, channels=channels)
        data = make(config.path, image_size=size, channels=channels)
        check_dataset(data, f"{key}.kind {config.kind!r}")
    else:
        kinds = (*KINDS, "bin") if key == "eval" else KINDS
        raise ValueError(
            f"{key}.kind is {config.kind!r}{did_you_mean(config.kind, kinds)}; expected one of {', '.join(kinds)}, "
            'or "module:attr"'
        )
    return data


def check_dataset(data: Any, what: str) -> None:
    """ValueError unless the object of a user's data.kind, or whatever made it, has what a Dataset has."""
    lacks = [name for name in ("labels", "num_classes", "name", "__len__", "__getitem__") if not hasattr(data, name)]
    if lacks:
        raise ValueError(
            f"{what} gave a {type(data).__name__} without {', '.join(lacks)}; expected labels [N], "
            "num_classes, len(), [i] -> (image uint8 [H, W, C], label) and name(i)"
        )


def num_classes(config: Config, data: Dataset) -> int:
    """Classes of the head: the data's, unless data.num_classes asks for more."""
    asked = config.data.num_classes
    if asked and asked < data.num_classes:
        raise ValueError(
            f"data.num_classes is {asked} but the data has labels up to {data.num_classes - 1}; expected at least "
            f"{data.num_classes}, or 0 to take the data's"
        )
    if not asked and data.num_classes > 1000 * len(data):
        raise ValueError(
            f"the data has {len(data)} images but labels up to {data.num_classes - 1}: each number would be "
            "a row of the head; number the classes from 0, or say --data.num-classes if that is meant"
        )
    return asked or data.num_classes


def build_eval(config: Config, train: Dataset) -> tuple[Dataset, Pairs | None]:
    """The evaluation set and, for verification, its pairs."""
    ask = config.eval
    if ask.kind == "bin":
        if ask.task != "verification" or ask.pairs:
            raise ValueError("eval.kind 'bin' brings its own pairs: expected eval.task 'verification', no eval.pairs")
        if not ask.path:
            raise ValueError("eval.path is not given; eval.kind 'bin' reads from one, pass --eval.path X.bin")
        size, channels = config.data.image_size, config.data.channels
        with _of_kind("eval", ask.kind, ask.path):
            pairs_set = VerificationSet(ask.path, image_size=size, channels=channels, folds=ask.folds)
        return pairs_set, pairs_set.pairs
    if ask.kind or ask.path:
        source = replace(config.data, kind=ask.kind or config.data.kind, path=ask.path, cache="")
        data = build_data(source, seed=config.seed, split="test", key="eval")
    elif config.data.kind == "glyphs" and ask.task == "verification":
        data = build_data(config.data, seed=config.seed, split="test")
    else:
        data = train
    if ask.task != "verification":
        return data, None
    if ask.pairs:
        return data, _read_pairs("eval.pairs", ask.pairs, data)
    try:
        return data, make_pairs(np.asarray(data.labels), num_pairs=ask.num_pairs, folds=ask.folds, seed=config.seed)
    except ValueError as error:
        raise ValueError(f"{error}; see --eval.num-pairs, --eval.folds, or give a list with --eval.pairs") from error


def build_sets(config: Config) -> dict[str, tuple[Dataset, Pairs]]:
    """The further verification sets of eval.sets, by the names of their files."""
    ask, made = config.eval, dict[str, tuple[Dataset, Pairs]]()
    size, channels = config.data.image_size, config.data.channels
    if ask.sets and ask.task != "verification":
        raise ValueError(f"eval.sets are verified, got eval.task {ask.task!r}; expected 'verification'")
    for entry in ask.sets:
        path, _, pairs = entry.partition("=")
        found = sorted(glob.glob(path))
        if not found:
            raise ValueError(
                f"eval.sets: {entry} does not exist; expected X.bin, a pattern such as 'DIR/*.bin', or DATA=PAIRS.txt"
            )
        for file in found:
            name = PurePath(file).stem
            if name in made:
                raise ValueError(f"eval.sets: two are called {name!r}, expected names that differ; rename one")
            if pairs:
                with opening("eval.sets", file):
                    images = open_images(file, image_size=size, channels=channels)
                made[name] = images, _read_pairs("eval.sets", pairs, images)
            elif file.endswith(".bin"):
                with opening("eval.sets", file):
                    own = VerificationSet(file, image_size=size, channels=channels, folds=ask.folds)
                made[name] = own, own.pairs
            else:
                raise ValueError(f"eval.sets: {file} has no pairs of its own; expected a .bin, or {file}=PAIRS.txt")
    return made


def _read_pairs(key: str, path: str, data: Dataset) -> Pairs:
    with opening(key, path):
        return read_pairs(path, [data.name(i) for i in range(len(data))])


def build_transform(config: DataConfig) -> Augment | None:
    """What happens to a training image: config.augment names the strength, flip and crop are said apart."""
    if config.augment == "none" and not config.flip and not config.crop:
        return None
    return replace(AUGMENTS[config.augment], flip=config.flip, crop=config.crop)


def build_backbone(config: Config) -> nn.Module:
    data, model = config.data, config.model
    made = build_model(model.backbone, model.embedding_size, image_size=data.image_size, in_channels=data.channels)
    # Convolutions run a fifth faster so on CPUs, and under AMP on GPUs.
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def build_head(config: Config, classes: int, comm: Communicator) -> Head:
    """The class-parallel head, or the plain softmax classifier for margin = "linear"."""
    ask, size = config.head, config.model.embedding_size
    if ask.margin == "linear":
        if ask.margin_args:
            raise ValueError(
                f"head.margin 'linear' takes no margin_args, got {', '.join(ask.margin_args)}; leave them out"
            )
        if ask.sample_rate != 1.0 or ask.sub_centers != 1 or ask.fused or ask.filter_threshold is not None or ask.store:
            raise ValueError("head.margin 'linear' takes no sample_rate, sub_centers, fused, filter_threshold or store")
        if ask.product_dtype == "bf16":
            raise ValueError("head.margin 'linear' takes no product_dtype 'bf16': it multiplies in fp32")
        return ClassParallelLinear(size, classes, comm=comm, seed=config.seed, cache_mb=ask.cache_mb)
    kept = {"weight_dtype": "fp32", "state_dtype": "fp32", "unsampled": "still"}
    asked = [f"{name}={getattr(ask, name)!r}" for name, usual in kept.items() if getattr(ask, name) != usual]
    if asked and not ask.fused:
        raise ValueError(f"head: {', '.join(asked)} needs fused = true: a torch optimizer keeps all rows in fp32")
    return ClassParallelHead(
        size,
        classes,
        margin=build_margin(ask.margin, ask.margin_args),
        comm=comm,
        sample_rate=ask.sample_rate,
        sub_centers=ask.sub_centers,
        filter_threshold=ask.filter_threshold,
        seed=config.seed,
        cache_mb=ask.cache_mb,
        cache_dtype=ask.cache_dtype,
        product_dtype=ask.product_dtype,
        weight=build_store(config, comm) if ask.store else None,
        weight_dtype=ask.weight_dtype,
        head_optimizer=build_row_optimizer(config.optim, ask) if ask.fused else None,
    )


def build_margin(name: str, args: dict[str, Any]) -> Margin:
    """A margin by name, or a user's "module:Class", with its arguments checked by name."""
    if ":" in name:
        kind = import_attr(name, "head.margin")
    elif name in MARGINS:
        kind = MARGINS[name]
    else:
        known = [*MARGINS, "linear"]
        raise ValueError(f"head.margin is {name!r}{did_you_mean(name, known)}; expected one of {', '.join(known)}")
    names = _option_names(kind)
    for key in args:
        if names is not None and key not in names:
            raise ValueError(
                f"head.margin_args: unknown {key!r}{did_you_mean(key, names)}; {name} takes "
                f"{', '.join(names) or 'none'}"
            )
    check_call(kind, f"head.margin {name!r} with head.margin_args {args}", **args)
    try:
        made = kind(**args)
    except Exception as error:
        error.add_note(f"(while head.margin {name!r} was made with head.margin_args {args})")
        raise
    if not isinstance(made, Margin):
        raise ValueError(f"head.margin {name!r} made a {type(made).__name__}, expected a plsc.Margin")
    if type(made).target is Margin.target:
        raise ValueError(f"head.margin {name!r}: {type(made).__name__} does not define target(cos)")
    return made


def _option_names(kind: Callable[..., Any]) -> list[str] | None:
    """What it can be given by name; None where that is not to be known."""
    try:
        parameters = inspect.signature(kind).parameters
    except ValueError:
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else list(parameters)


def build_row_optimizer(config: OptimConfig, head: HeadConfig) -> RowOptimizer:
    """The row optimizer that steps as the torch optimizer of the same name."""
    lr, decay = config.lr, config.weight_decay
    if config.name != "sgd" and head.state_dtype != "fp32":
        raise ValueError(f"head.state_dtype {head.state_dtype!r} is for optim.name 'sgd', got {config.name!r}")
    if config.name == "sgd":
        momentum, nesterov = config.momentum, config.nesterov
        kept = head.state_dtype if momentum else "fp32"
        return SGD(lr, decay, momentum=momentum, nesterov=nesterov, state_dtype=kept, unsampled=head.unsampled)
    if config.name == "adamw":
        return AdamW(lr, decay, betas=config.betas, unsampled=head.unsampled)
    if head.unsampled != "still":
        raise ValueError("head.unsampled 'decayed' is for optim.name 'sgd' and 'adamw', got 'lars'")
    return LARS(lr, decay, momentum=config.momentum)


def build_optim(config: Config, *modules: nn.Module) -> Optimizer:
    """The optimizer of backbone and head; a weight that is fused or in a store is updated there and stays out."""
    ask = config.optim
    if config.head.fused or config.head.store:
        modules = modules[:-1]
    groups = param_groups(*modules, weight_decay=ask.weight_decay)
    return build_optimizer(
        ask.name,
        groups,
        lr=ask.lr,
        momentum=ask.momentum,
        nesterov=ask.nesterov,
        weight_decay=ask.weight_decay,
        betas=ask.betas,
    )


def build_schedule(config: Config, total_steps: int, step_at: Callable[[float], float]) -> Schedule:
    """step_at(epoch): the step at which that epoch begins."""
    ask = config.optim
    return Schedule(
        ask.schedule,
        total_steps,
        warmup_steps=min(max(round(step_at(ask.warmup_epochs)), 0), total_steps),
        power=ask.power,
        milestones=tuple(round(step_at(epoch)) for epoch in ask.milestones),
        gamma=ask.gamma,
        final=ask.final,
    )


def import_attr(spec: str, what: str) -> Any:
    """The object that "package.module:attr" names; ValueError says what is missing."""
    module_name, _, attr = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attr)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ValueError(f'{what} is {spec!r}: {error}; expected an importable "package.module:name"') from error
    if not callable(found):
        raise ValueError(f"{what} is {spec!r}, a {type(found).__name__}; expected a class or a function")
    return found
