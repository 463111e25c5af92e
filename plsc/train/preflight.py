"""What can be said before the first step rather than when it goes wrong: the output folder, the disk, the cores."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from plsc.comm import together
from plsc.train.class_store import is_servers
from plsc.train.config import Config
from plsc.train.launch import num_cores

if TYPE_CHECKING:
    from plsc.train.trainer import Trainer

logger = logging.getLogger(__name__)

OPTIMIZER_COPIES = {"sgd": 1, "lars": 1, "adamw": 2}  # of every weight, in the optimizer's state
GIB = 2**30


def check_folder(path: str | Path, flag: str) -> None:
    """ValueError unless the folder, existing or yet to be made, can be written into; leaves nothing behind."""
    there = existing(path)
    if not there.is_dir():
        raise ValueError(f"{flag} is {str(path)!r}, but {there} is a file; expected a folder, or a new name for one")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"{flag} is {str(path)!r}, but nothing can be written into {there} ({error.strerror}); expected a folder "
            "of yours on a disk with room"
        ) from error


def existing(path: str | Path) -> Path:
    """The path itself or the nearest folder (or file) above it that exists."""
    found = Path(path).absolute()
    while not os.path.lexists(found) and found != found.parent:
        found = found.parent
    return found


def look_ahead(trainer: Trainer) -> None:
    """Says what will go wrong or slowly in a run that is about to begin, ValueError where it cannot end; collective."""
    comm, config = trainer.fleet.comm, trainer.config

    def check() -> None:
        if comm.rank == 0:
            size = checkpoint_bytes(config, trainer.backbone, trainer.num_classes)
            check_room(trainer.checkpoints.directory, size, keep=config.keep, kept=len(trainer.checkpoints.steps()))
            for line in warnings_of(config, num_classes=trainer.num_classes, num_ranks=comm.world_size):
                logger.warning("%s", line)

    together(comm, "begin", check)


def checkpoint_bytes(config: Config, backbone: nn.Module, num_classes: int) -> int:
    """Of one checkpoint, about: weights, and the optimizer's state of each."""
    head = num_classes * config.head.sub_centers * config.model.embedding_size * 4
    if is_servers(config.head.store):  # which save their rows where they are
        head = 0
    weights = sum(tensor.numel() * tensor.element_size() for tensor in backbone.parameters()) + head
    moves = config.optim.name == "adamw" or config.optim.momentum > 0
    return weights * (1 + (OPTIMIZER_COPIES[config.optim.name] if moves else 0))


def check_room(directory: Path, size: int, *, keep: int, kept: int) -> None:
    """ValueError where the disk has no room for one checkpoint; a warning where it has not for all that are kept."""
    free = shutil.disk_usage(existing(directory)).free
    if size > free:
        raise ValueError(
            f"a checkpoint takes {size / GIB:.2f} GiB and the disk of {directory} has {free / GIB:.2f} GiB left; make "
            "room, or give an --out on another disk"
        )
    needed = max(keep + 1 - kept, 1)  # the new one is written before the oldest goes
    if needed * size > free:
        logger.warning(
            "the disk of %s has %.2f GiB left, and %d more checkpoints of %.2f GiB are to come before old ones go; "
            "make room, or keep fewer with --keep",
            directory,
            free / GIB,
            needed,
            size / GIB,
        )


def warnings_of(config: Config, *, num_classes: int, num_ranks: int) -> list[str]:
    """What is allowed and hardly meant."""
    found = []
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    readers, cores = config.data.workers * here, num_cores()
    if readers > cores:
        found.append(
            f"data.workers is {config.data.workers} on each of {here} ranks: {readers} reading processes share "
            f"{cores} cores; --data.workers {cores // here} is enough"
        )
    if here > cores:
        found.append(f"{here} ranks share {cores} cores: fewer are faster here (--nproc)")
    if num_ranks > num_classes:
        found.append(f"there are {num_ranks} ranks and {num_classes} classes: some ranks hold none and help little")
    return found
