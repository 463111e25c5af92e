"""A run from start to end, and what is left of it: figures, plots, ONNX, class centres, embeddings."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from plsc.comm import Communicator, together
from plsc.data import open_images
from plsc.data.parquet import write_embeddings
from plsc.fleet import Fleet
from plsc.train.build import Progress, build_backbone
from plsc.train.checkpoint import Checkpoints, load
from plsc.train.config import Config
from plsc.train.evaluate import VerificationResult, embed
from plsc.train.export import export_embeddings, export_head_centres, export_onnx, model_digest
from plsc.train.plots import plot_loss, plot_roc, read_records
from plsc.train.trainer import AMP_DTYPES, Trainer


def train(
    config: Config, *, comm: Communicator | None = None, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Trains, evaluates, plots and exports; returns the figures, or None if a signal stopped the run early.

    Ctrl-C in this process also saves first, and is raised as KeyboardInterrupt then.
    """
    with closing(Trainer(config, comm=comm, progress=progress)) as trainer:
        if not trainer.fit():
            if trainer.stopped_by == signal.SIGINT:
                raise KeyboardInterrupt
            return None
        result = measure(trainer)
        if config.export:
            export_run(trainer)
        return result


def evaluate(config: Config, *, comm: Communicator | None = None) -> dict[str, Any]:
    """Measures a run's newest checkpoint again, on any number of ranks."""
    with closing(_resumed(config, comm)) as trainer:
        return measure(trainer)


def export(config: Config, *, comm: Communicator | None = None) -> dict[str, Path]:
    """Writes the artifacts of a run's newest checkpoint again, on any number of ranks, without measuring it."""
    with closing(_resumed(config, comm)) as trainer:
        return export_run(trainer)


def embed_images(
    config: Config,
    source: str,
    target: str,
    *,
    comm: Communicator | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Embeddings of the images at `source`, in order, by the backbone of a run's newest checkpoint; collective.

    target: .safetensors (as `export_embeddings` writes them) or .parquet (columns embedding, label, name). The run's
    own data need not be there. progress counts rank 0's images.
    """
    fleet = Fleet(config.strategy, comm)
    data = open_images(source, image_size=config.data.image_size, channels=config.data.channels)
    backbone = fleet.replicate(build_backbone(config))
    newest = Checkpoints(Path(config.out) / "checkpoints", comm=fleet.comm).latest()
    if newest is None:
        raise ValueError(f"{config.out} has no whole checkpoint; train it first with plsc-train")
    load(newest, comm=fleet.comm, backbone=backbone)
    rows = embed(
        backbone,
        data,
        comm=fleet.comm,
        batch_size=config.eval.batch_size,
        device=fleet.device,
        flip=config.eval.flip,
        autocast=AMP_DTYPES[config.strategy.amp],
        workers=config.data.workers,
        progress=progress,
    )
    digest = model_digest(backbone)

    def write() -> None:
        if fleet.rank == 0:
            names = [data.name(i) for i in range(len(data))]
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            if target.endswith(".parquet"):
                write_embeddings(target, rows, np.asarray(data.labels), names)
            else:
                export_embeddings(target, rows, labels=data.labels, digest=digest, names=names)

    together(fleet.comm, f"write {target}", write)
    return Path(target)


def measure(trainer: Trainer) -> dict[str, Any]:
    """Evaluates, then rank 0 writes result.json and the plots. Collective."""
    result = trainer.evaluate()

    def write() -> None:
        if trainer.fleet.rank == 0:
            text = json.dumps({"step": trainer.step, **result}, indent=2)
            (trainer.out / "result.json").write_text(text + "\n", encoding="utf-8")
            draw(trainer.out, trainer.verified)

    together(trainer.fleet.comm, f"write the results into {trainer.out}", write)
    return result


def draw(out: Path, verified: VerificationResult | None) -> None:
    """loss.png from the metrics, roc.png from a verification."""
    records = [record for record in read_records(out / "metrics.jsonl") if "loss" in record]
    if records:
        plot_loss(records, out / "loss.png")
    if verified is not None:
        plot_roc({"verification": verified.roc}, out / "roc.png")


def export_run(trainer: Trainer) -> dict[str, Path]:
    """Writes model.onnx, centres.safetensors and embeddings.safetensors into the run's export folder; collective."""
    config, out = trainer.config, trainer.out / "export"
    paths = {
        "onnx": out / "model.onnx",
        "centres": out / "centres.safetensors",
        "embeddings": out / "embeddings.safetensors",
    }
    comm, digest = trainer.fleet.comm, model_digest(trainer.backbone)

    def write_model() -> None:
        if comm.rank == 0:
            export_onnx(
                trainer.backbone, paths["onnx"], image_size=config.data.image_size, in_channels=config.data.channels
            )

    together(comm, f"export {paths['onnx']}", write_model)
    names = getattr(trainer.data, "class_names", None)
    whole = names is not None and len(names) == trainer.num_classes
    export_head_centres(paths["centres"], trainer.head, digest=digest, class_names=names if whole else None)
    data, embeddings = trainer.embed()

    def write_embeddings() -> None:
        if comm.rank == 0:
            names = [data.name(i) for i in range(len(data))]
            export_embeddings(paths["embeddings"], embeddings, labels=data.labels, digest=digest, names=names)

    together(comm, f"export {paths['embeddings']}", write_embeddings)
    return paths


def _resumed(config: Config, comm: Communicator | None) -> Trainer:
    trainer = Trainer(config, comm=comm)
    if not trainer.resume():
        raise ValueError(f"{config.out} has no checkpoint; train it first with plsc-train")
    return trainer
