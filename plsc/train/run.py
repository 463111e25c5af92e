"""A run from start to end, and what is left of it: figures, plots, ONNX, class centres, embeddings."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from plsc.comm import Communicator, together
from plsc.data import open_images
from plsc.fleet import Fleet
from plsc.train.artifacts import export_run
from plsc.train.build import Progress, build_backbone
from plsc.train.bulk import embed_to_file
from plsc.train.checkpoint import Checkpoints, load
from plsc.train.config import Config
from plsc.train.evaluate import VerificationResult
from plsc.train.plots import plot_loss, plot_roc, read_records
from plsc.train.preflight import look_ahead
from plsc.train.report import write_report
from plsc.train.trainer import AMP_DTYPES, Trainer


def train(
    config: Config, *, comm: Communicator | None = None, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Trains, evaluates, plots and exports; returns the figures, or None if a signal stopped the run early.

    Ctrl-C in this process also saves first, and is raised as KeyboardInterrupt then.
    """
    with closing(Trainer(config, comm=comm, progress=progress)) as trainer:
        look_ahead(trainer)
        if not trainer.fit():
            if trainer.stopped_by == signal.SIGINT:
                raise KeyboardInterrupt
            return None
        result = measure(trainer)
        if config.export:
            export_run(trainer)
        return result


def evaluate(config: Config, *, report: str = "", comm: Communicator | None = None) -> dict[str, Any]:
    """Measures a run's newest checkpoint again, on any number of ranks. report: a folder for a page of pictures."""
    with closing(_resumed(config, comm)) as trainer:
        result = measure(trainer)
        if report:
            write_report(trainer, report, result)
        return result


def export(
    config: Config, *, to: str = "all", thumbnails: bool = False, comm: Communicator | None = None
) -> dict[str, Path]:
    """Writes the artifacts of a run's newest checkpoint again, on any number of ranks; see export_run."""
    with closing(_resumed(config, comm)) as trainer:
        return export_run(trainer, to=to, thumbnails=thumbnails)


def embed_images(
    config: Config,
    source: str,
    target: str,
    *,
    overwrite: bool = False,
    comm: Communicator | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Embeddings of the images at `source`, in order, by the backbone of a run's newest checkpoint; collective.

    target: .safetensors (as `export_embeddings` writes them) or .parquet (columns id, embedding, norm, label, name).
    The run's own data need not be there. What was ended before goes on; a target of another model or data is refused
    unless `overwrite`. progress counts rank 0's images.
    """
    fleet = Fleet(config.strategy, comm)
    data = open_images(source, image_size=config.data.image_size, channels=config.data.channels)
    backbone = fleet.replicate(build_backbone(config))
    newest = Checkpoints(Path(config.out) / "checkpoints", comm=fleet.comm).latest()
    if newest is None:
        raise ValueError(f"{config.out} has no whole checkpoint; train it first with plsc-train")
    load(newest, comm=fleet.comm, backbone=backbone)
    return embed_to_file(
        backbone,
        data,
        target,
        source=os.path.abspath(source),
        comm=fleet.comm,
        batch_size=config.eval.batch_size,
        device=fleet.device,
        flip=config.eval.flip,
        autocast=AMP_DTYPES[config.strategy.amp],
        workers=config.data.workers,
        progress=progress,
        overwrite=overwrite,
    )


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


def draw(out: Path, verified: Mapping[str, VerificationResult]) -> None:
    """loss.png from the metrics, roc.png from the verification of each set."""
    records = [record for record in read_records(out / "metrics.jsonl") if "loss" in record]
    if records:
        plot_loss(records, out / "loss.png")
    if verified:
        plot_roc({name: found.roc for name, found in verified.items()}, out / "roc.png")


def _resumed(config: Config, comm: Communicator | None) -> Trainer:
    trainer = Trainer(config, comm=comm)
    if not trainer.resume():
        raise ValueError(f"{config.out} has no checkpoint; train it first with plsc-train")
    return trainer
