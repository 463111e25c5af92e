"""What is left of a run for others to use: its export folder, part by part, and the facts that go with it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from plsc.comm import together
from plsc.data import Dataset
from plsc.data.embeddings import atomic_file, write_safetensors
from plsc.train.evaluate import verify
from plsc.train.export import (
    export_embeddings,
    export_head_centres,
    export_onnx,
    export_program,
    export_weights,
    model_digest,
)
from plsc.train.trainer import Trainer

PARTS = {
    "onnx": ("model.onnx",),
    "pt2": ("model.pt2",),
    "safetensors": ("backbone.safetensors", "centres.safetensors", "embeddings.safetensors"),
    "bundle": ("model.onnx", "centres.safetensors", "facts.json"),
    "all": ("model.onnx", "centres.safetensors", "embeddings.safetensors", "facts.json"),
}
THUMBNAILS = "thumbnails.safetensors"
DRAWN = ("glyphs", "synthetic")  # kinds of data whose images are nobody's
MAX_THUMBNAILS = 200_000  # classes


def export_run(trainer: Trainer, *, to: str = "all", thumbnails: bool = False) -> dict[str, Path]:
    """Writes parts of a run into its export folder; collective. Returns the paths by file name without its suffix.

    to: a name of PARTS. facts.json has what the tensors do not say: thresholds and the rates measured at them, whether
    embeddings are sums with mirror images. thumbnails: the first image of each class beside it; those of drawn
    characters always. Without them, those of an earlier call go: training images leave by wish only.
    """
    if to not in PARTS:
        raise ValueError(f"to: got {to!r}, expected one of {', '.join(PARTS)}")
    config, out, comm = trainer.config, trainer.out / "export", trainer.fleet.comm
    digest = model_digest(trainer.backbone)
    size, channels = config.data.image_size, config.data.channels
    names = getattr(trainer.data, "class_names", None)
    whole = names is not None and len(names) == trainer.num_classes

    def embeddings(path: Path) -> None:
        data, rows = trainer.embed()
        label = [data.name(i) for i in range(len(data))]
        export_embeddings(path, rows, labels=data.labels, digest=digest, names=label)

    writers: dict[str, Callable[[Path], Any]] = {  # of rank 0
        "model.onnx": lambda path: export_onnx(trainer.backbone, path, image_size=size, in_channels=channels),
        "model.pt2": lambda path: export_program(trainer.backbone, path, image_size=size, in_channels=channels),
        "backbone.safetensors": lambda path: export_weights(trainer.backbone, path),
        "embeddings.safetensors": embeddings,
        "facts.json": lambda path: _write_facts(path, trainer, digest),
    }
    wanted = list(PARTS[to])
    if "facts.json" in wanted and (thumbnails or config.data.kind in DRAWN):
        writers[THUMBNAILS] = lambda path: write_thumbnails(path, trainer.data, trainer.num_classes)
        wanted.append(THUMBNAILS)
    for name in wanted:
        path = out / name
        if name == "centres.safetensors":
            export_head_centres(path, trainer.head, digest=digest, class_names=names if whole else None)
            continue
        if name == "embeddings.safetensors" or (name == "facts.json" and trainer.pairs is not None):
            trainer.embed()  # collective; what follows is rank 0's

        def write(name: str = name, path: Path = path) -> None:
            if comm.rank == 0:
                writers[name](path)
                if name == "facts.json":
                    path.with_name(THUMBNAILS).unlink(missing_ok=True)  # of an earlier call

        together(comm, f"export {path}", write)
    return {Path(name).stem: out / name for name in wanted}


def write_thumbnails(path: Path, data: Dataset, num_classes: int) -> None:
    """The first image of each class as a JPEG; a class without one has no bytes."""
    if num_classes > MAX_THUMBNAILS:
        raise ValueError(f"thumbnails: got {num_classes} classes, expected at most {MAX_THUMBNAILS}; leave them out")
    labels = np.asarray(data.labels)
    images = [b""] * num_classes
    for label, first in zip(*np.unique(labels, return_index=True), strict=True):
        if 0 <= label < num_classes:
            images[label] = encode_jpeg(data[int(first)][0])
    offsets = np.cumsum([0, *map(len, images)], dtype=np.int64)
    blob = np.frombuffer(b"".join(images), np.uint8)
    tensors: list[Any] = [("offsets", "int64", offsets.shape, [offsets]), ("images", "uint8", blob.shape, [blob])]
    write_safetensors(path, tensors, {"format": "plsc-thumbnails"})


def encode_jpeg(pixels: np.ndarray) -> bytes:
    """Decoded pixels [S, S, C] as a JPEG of 112 pixels or less."""
    image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    image.thumbnail((112, 112))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=85)
    return out.getvalue()


def _write_facts(path: Path, trainer: Trainer, digest: str) -> None:
    config = trainer.config
    points: Sequence[Any] = ()
    if trainer.pairs is not None:
        points = verify(trainer.embed()[1], trainer.pairs).tar
    facts = {
        "name": trainer.out.resolve().name,
        "step": trainer.step,
        "model_digest": digest,
        "flip": config.eval.flip,
        "thresholds": [
            {"threshold": p.threshold, "far": p.far, "measured_far": p.measured_far, "tar": p.tar}
            for p in points
            if math.isfinite(p.tar) and math.isfinite(p.threshold)
        ],
    }
    with atomic_file(path) as file:
        file.write((json.dumps(facts, indent=2, allow_nan=False) + "\n").encode())
