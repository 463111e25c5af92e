"""Runs of a few steps on thread ranks, for tests of the loop and of what resumes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.comm import Communicator, run_ranks
from plsc.train import Config, Trainer
from plsc.train.config import DataConfig, EvalConfig, HeadConfig, ModelConfig, OptimConfig

BASE = Config(
    epochs=2,
    batch_size=12,
    log_every=1,
    save_every=3,
    export=False,
    data=DataConfig(kind="synthetic", image_size=16, channels=1, num_classes=10, num_samples=96, workers=0, crop=1),
    model=ModelConfig(backbone="plainnet", embedding_size=8),
    head=HeadConfig(margin="cosface", margin_args={"scale": 16.0}),
    optim=OptimConfig(lr=0.05, warmup_epochs=0.5),
    eval=EvalConfig(task="none"),
)


def change(config: Config, **changes: Any) -> Config:
    """Replaces fields; `head={"fused": True}` replaces fields of a table."""
    made = {}
    for name, value in changes.items():
        old = getattr(config, name)
        made[name] = dataclasses.replace(old, **value) if isinstance(value, dict) else value
    return dataclasses.replace(config, **made)


def run(config: Config, world: int, *, stop_at: int = 0) -> list[Trainer]:
    """Trains on thread ranks; with stop_at a signal arrives during that step."""

    def body(comm: Communicator) -> Trainer:
        trainer = Trainer(config, comm=comm)
        if stop_at:
            step = trainer.fleet.step

            def stopping(loss: Tensor, optimizer: torch.optim.Optimizer) -> Any:
                if trainer.step + 1 == stop_at and comm.rank == world - 1:
                    trainer._signal = 15
                return step(loss, optimizer)

            trainer.fleet.step = stopping  # type: ignore[method-assign]
        assert trainer.fit() == (not stop_at)
        return trainer

    return run_ranks(world, body)


def losses(config: Config) -> dict[int, float]:
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}
