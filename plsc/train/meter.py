"""Loss and speed of a run between two log lines, and what is said of a loss that is not finite."""

from __future__ import annotations

import logging
import math
import time
from typing import Protocol

import torch
from torch import Tensor

from plsc.data import Loader
from plsc.fleet import Fleet, NonFiniteLoss
from plsc.train.checkpoint import Checkpoints
from plsc.train.config import Config
from plsc.train.metrics_log import MetricsLog

logger = logging.getLogger(__name__)

AFTER_NAN = (
    "the same command would stop here again: lower the learning rate (--optim.lr) or clip (--strategy.clip-norm); "
    "where the loss was rising before that checkpoint already, delete its folder, and the run goes on from the one "
    "before"
)


class Run(Protocol):
    """What a log line is about: a Trainer."""

    config: Config
    fleet: Fleet
    loader: Loader
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints
    log: MetricsLog | None
    step: int
    total_steps: int


class Meter:
    """Loss and speed between two log lines; losses stay on the device until then."""

    def __init__(self, trainer: Run) -> None:
        self.trainer = trainer
        self.restart()

    def restart(self) -> None:
        self.losses: list[Tensor] = []
        self.images, self.steps, self.since = 0, self.trainer.step, time.perf_counter()

    def add(self, loss: Tensor, batch: int) -> None:
        self.losses.append(loss.detach())
        self.images += batch * self.trainer.fleet.world_size

    def report(self, grad_norm: float | None) -> None:
        """Mean loss over ranks and steps, to the log and the metrics files; collective."""
        trainer = self.trainer
        total = torch.stack(self.losses).mean()
        loss = float(trainer.fleet.comm.all_reduce(total).wait()) / trainer.fleet.world_size
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss is {loss} at step {trainer.step}; last checkpoint: {trainer.checkpoints.latest()}; "
                f"{AFTER_NAN}"
            )
        seconds = max(time.perf_counter() - self.since, 1e-9)
        rate, done = self.images / seconds, trainer.step - self.steps
        eta = (trainer.total_steps - trainer.step) * seconds / max(done, 1)
        lr = trainer.optimizer.param_groups[0]["lr"]
        record = {
            "step": trainer.step,
            "epoch": trainer.loader.epoch,
            "loss": loss,
            "lr": lr,
            "images_per_second": rate,
        }
        if grad_norm is not None:
            record["grad_norm"] = grad_norm
        if trainer.fleet.scaler is not None:
            record["loss_scale"] = trainer.fleet.scaler.loss_scale
        if trainer.log is not None:
            trainer.log.write(record)
        logger.info(
            "step %d/%d  epoch %d/%d  loss %.4f  lr %.4g  %.0f images/s  ETA %s",
            trainer.step,
            trainer.total_steps,
            trainer.loader.epoch + 1,
            trainer.config.epochs,
            loss,
            lr,
            rate,
            clock(eta),
        )
        self.restart()


def clock(seconds: float) -> str:
    """Seconds as H:MM:SS."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
