"""What must be the same when a run goes on: its classes, by name, and the settings its weights are made for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plsc.data import Dataset, Relabelled
from plsc.train.config import Config, to_dict
from plsc.train.storage import replace_durably

# Weights, optimizer state and sample order are made for these.
FIXED = (
    "seed",
    "data.image_size",
    "data.channels",
    "model.backbone",
    "model.embedding_size",
    "head.margin",
    "head.margin_args",
    "head.sub_centers",
    "optim.name",
)
# These say how a run is written down, run or measured, not what it computes.
FREE = (
    "out",
    "nproc",
    "timeout",
    "max_restarts",
    "check",
    "plan",
    "log_every",
    "save_every",
    "keep",
    "resume",
    "export",
    "eval.",
    "data.workers",
    "head.cache_mb",
    "head.extend_classes",
)


def compare_settings(saved: Mapping[str, Any], config: Config) -> list[str]:
    """What differs from the run that is to go on, as "name: old -> new"; ValueError for what may not differ."""
    old, new = _flat(saved), _flat(to_dict(config))
    if new["model.weights"] not in ("", old.get("model.weights", "")):
        raise ValueError(
            f"model.weights is {config.model.weights!r}, but {config.out} holds a run that has begun already: it only "
            "says what a run starts from; give another --out, or leave it out to go on"
        )
    old["model.weights"] = new["model.weights"]
    changed = {
        name: f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in dict.fromkeys([*new, *old])  # what is None is left out
        if old.get(name) != new.get(name)
    }
    if fixed := [text for name, text in changed.items() if name.startswith(FIXED)]:
        raise ValueError(
            f"{config.out} holds a run with other settings ({'; '.join(fixed)}), which cannot change under way; give "
            f"another --out, perhaps with --model.weights {config.out} to start from the backbone trained there"
        )
    return [text for name, text in changed.items() if not name.startswith(FREE)]


def class_names(data: Dataset) -> list[str] | None:
    """The names of the classes in the order of their numbers; None for data that number their classes themselves."""
    names = getattr(data, "class_names", None)
    if names is None:
        return None
    found = [str(name) for name in names]
    return found if len(set(found)) == len(found) else None


def digest(names: Sequence[str] | None) -> str | None:
    return None if names is None else hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()


def write_classes(out: Path, names: Sequence[str] | None) -> None:
    """Class names go beside the config, once a run and not into every checkpoint: there may be millions."""
    if names is not None:
        replace_durably(out / "classes.json", [json.dumps(list(names)).encode()])


def read_classes(out: Path, saved: Mapping[str, Any]) -> list[str] | None:
    """The names a checkpoint's classes had; None where they had none."""
    about = saved.get("classes")
    if about is None:
        return None
    path = out / "classes.json"
    try:
        names = [str(name) for name in json.loads(path.read_text(encoding="utf-8"))][: about["count"]]
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}, which names the classes of the checkpoints beside it: {error}") from None
    if digest(names) != about["digest"]:
        raise ValueError(f"{path} is not of this run: its names are not those of the checkpoints; restore the file")
    return names


def match_classes(data: Dataset, known: Sequence[str] | None, *, extend: bool, where: str) -> Dataset:
    """The data with its classes numbered as `known`, new ones after these where `extend` allows any.

    A class keeps its number by name, whatever was sorted in before it. ValueError names the classes that do not fit.
    """
    names = class_names(data)
    if known is None or names is None or names == list(known):
        return data
    have, had = set(names), set(known)
    new, gone = [name for name in names if name not in had], [name for name in known if name not in have]
    if gone or (new and not extend):
        differ = [f"{len(found)} {what} ({_few(found)})" for what, found in (("new", new), ("gone", gone)) if found]
        remedy = (
            "a class that is renamed or removed would shift the numbers of others: put it back"
            if gone
            else "pass --head.extend-classes to train them too"
        )
        raise ValueError(f"{where}: its classes are not those of the checkpoint: {', '.join(differ)}; {remedy}")
    return Relabelled(data, [*known, *new])


def match_trained(data: Dataset, trained: Dataset, *, where: str) -> Dataset:
    """Evaluation data with its classes numbered as those trained; some may have no images, none may be new."""
    known, names = class_names(trained), class_names(data)
    if data is trained or known is None or names is None or names == known:
        return data
    if new := sorted(set(names) - set(known)):
        raise ValueError(
            f"{where}: {len(new)} of its classes were not trained ({_few(new)}); classification can only tell trained "
            "classes apart: remove them, or measure with --eval.task verification"
        )
    return Relabelled(data, known)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, names joined by dots; a table of free names stays whole."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and not name.endswith("_args"):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
