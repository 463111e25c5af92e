"""A run from start to end, and what is left of it: figures, plots, ONNX, class centres, embeddings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from plsc.comm import Communicator
from plsc.train.build import Progress
from plsc.train.config import Config
from plsc.train.evaluate import VerificationResult, embed
from plsc.train.export import export_embeddings, export_head_centres, export_onnx, model_digest
from plsc.train.plots import plot_loss, plot_roc, read_records
from plsc.train.trainer import AMP_DTYPES, Trainer

logger = logging.getLogger(__name__)


def train(
    config: Config, *, comm: Communicator | None = None, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Trains, evaluates, plots and exports; returns the figures, or None if a signal stopped the run early."""
    trainer = Trainer(config, comm=comm, progress=progress)
    if not trainer.fit():
        return None
    return finish(trainer, export=config.export)


def evaluate(config: Config, *, comm: Communicator | None = None, export: bool = False) -> dict[str, Any]:
    """Measures a run's newest checkpoint again, on any number of ranks; with `export` writes its artifacts again."""
    trainer = Trainer(config, comm=comm)
    if not trainer.resume():
        raise ValueError(f"{config.out} has no checkpoint to evaluate; train it first with plsc-train")
    return finish(trainer, export=export)


def finish(trainer: Trainer, *, export: bool) -> dict[str, Any]:
    """Evaluates, then rank 0 writes result.json and the plots, and all ranks export. Collective."""
    result = trainer.evaluate()
    if trainer.fleet.rank == 0:
        text = json.dumps({"step": trainer.step, **result}, indent=2)
        (trainer.out / "result.json").write_text(text + "\n", encoding="utf-8")
        draw(trainer.out, trainer.verified)
    if export:
        export_run(trainer)
    trainer.fleet.comm.barrier()
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
    digest = model_digest(trainer.backbone)
    rank0 = trainer.fleet.rank == 0
    if rank0:
        out.mkdir(parents=True, exist_ok=True)
        export_onnx(
            trainer.backbone, paths["onnx"], image_size=config.data.image_size, in_channels=config.data.channels
        )
    trainer.fleet.comm.barrier()
    names = getattr(trainer.data, "class_names", None)
    whole = names is not None and len(names) == trainer.num_classes
    export_head_centres(paths["centres"], trainer.head, digest=digest, class_names=names if whole else None)
    data, embeddings = trainer.eval_data, trainer.embeddings
    if data is None or embeddings is None:
        data = trainer.data if data is None else data
        embeddings = embed(
            trainer.backbone,
            data,
            comm=trainer.fleet.comm,
            batch_size=config.eval.batch_size,
            autocast=AMP_DTYPES[config.strategy.amp],
            flip=config.eval.flip,
        )
    if rank0:
        sample_names = [data.name(i) for i in range(len(data))]
        export_embeddings(paths["embeddings"], embeddings, labels=data.labels, digest=digest, names=sample_names)
    return paths
