"""Class centres of a run that lie in a store: the table or the servers a recipe names, and what is saved of them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from plsc.comm import Communicator, together
from plsc.nn.stored import STD, StoredHead
from plsc.ps import AdamW, Momentum, Rule, Table
from plsc.ps.choose import open_store
from plsc.train.checkpoint import Checkpoints
from plsc.train.config import Config, OptimConfig

logger = logging.getLogger(__name__)

TABLE = "classes"  # its name on servers


def build_store(config: Config, comm: Communicator) -> Any:
    """The store of head.store: a table of this rank's own, or the table "classes" of servers."""
    ask, store = config.head, config.head.store
    if ask.fused:
        raise ValueError(
            "head.store and head.fused exclude each other: a store's rule updates its rows; leave out fused"
        )
    if ask.sample_rate >= 1.0:
        raise ValueError(
            f"head.store needs head.sample_rate below 1, got {ask.sample_rate}: every step would read all classes from "
            "the store; give 0.1, or leave store out"
        )
    dim, rule, lr = config.model.embedding_size * ask.sub_centers, rule_of(config.optim), config.optim.lr
    if not lr > 0:
        raise ValueError(f"optim.lr is {lr}, expected more than 0 with head.store")
    if is_servers(store):
        try:
            at, ranks = store.split(","), {"rank": comm.rank, "workers": comm.world_size}
            found = open_store(TABLE, dim=dim, mode="direct", servers=at, args={}, rule=rule, **ranks)
            return found.store
        except ValueError as error:
            raise ValueError(f"head.store {store!r}: {error}") from error
    kind, _, folder = store.partition(":")
    if kind not in ("memory", "file") or (kind == "memory" and folder):
        raise ValueError(
            f"head.store is {store!r}, expected 'memory', 'file', 'file:FOLDER' (on a fast disk), or servers as "
            "'host:port,host:port'"
        )
    arena = None
    if kind == "file":
        arena = Path(folder or config.out)
        if not folder:
            arena.mkdir(parents=True, exist_ok=True)
    return Table(dim, rule=rule, lr=lr, init="normal", init_scale=STD, seed=config.seed, arena=arena)


def rule_of(ask: OptimConfig) -> Rule:
    """The store's rule that steps as the torch optimizer of the recipe."""
    if ask.name == "adamw":
        return AdamW(weight_decay=ask.weight_decay, beta1=ask.betas[0], beta2=ask.betas[1])
    if ask.name != "sgd" or ask.nesterov:
        got = "sgd with nesterov" if ask.nesterov else ask.name
        raise ValueError(f"optim: got {got} with head.store, expected sgd without nesterov, or adamw: no store has it")
    return Momentum(momentum=ask.momentum, weight_decay=ask.weight_decay)


def is_servers(store: str) -> bool:
    """Whether a head.store names servers, not a table of this process."""
    return store.partition(":")[0] not in ("memory", "file") and store.rpartition(":")[2].isdigit()


class ClassStore:
    """The part of a run's state that its checkpoints do not hold.

    Tables are saved beside each checkpoint, before it: a run goes on with the same numbers. Servers keep their rows
    themselves; a run goes on with those they hold.
    """

    def __init__(self, head: StoredHead, config: Config, checkpoints: Checkpoints) -> None:
        self.head, self.checkpoints = head, checkpoints
        self.servers = config.head.store if is_servers(config.head.store) else ""
        self.folder = checkpoints.directory.parent / "classes"

    def set_lr(self, lr: float) -> None:
        """For the next step; on servers it is one number for all ranks, who must have pushed with the old one."""
        if self.servers:
            self.head.comm.barrier()
        assert self.head.head_optimizer is not None
        self.head.head_optimizer.lr = lr

    def save(self, step: int) -> None:
        """To be called before the checkpoint of that step is written; collective."""
        if self.servers:
            return
        folder, comm = self._of(step), self.head.comm

        def clear() -> None:  # of a run on another number of ranks that ended before its checkpoint
            if comm.rank == 0 and step not in self.checkpoints.steps():
                shutil.rmtree(folder, ignore_errors=True)

        together(comm, f"clear {folder}", clear)
        together(comm, f"save the classes to {folder}", lambda: self.head.save_classes(folder))

    def tidy(self) -> None:
        """Deletes tables whose checkpoint is gone."""
        if self.servers or self.head.comm.rank:
            return
        kept = {self._of(step) for step in self.checkpoints.steps()}
        for path in self.folder.glob("step_*"):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def load(self, checkpoint: Path) -> None:
        """To be called before the checkpoint is: tables as they were with it, servers as they are. Collective."""
        folder = self.folder / checkpoint.name
        if not self.servers:
            together(self.head.comm, f"load {folder}", lambda: self.head.load_classes(folder))
        elif self._rows() == 0:
            raise ValueError(
                f"head.store: the servers {self.servers} hold no classes, but the run to go on ({checkpoint.name}) has "
                "trained some; start the servers with the folders they had"
            )
        else:
            logger.warning(
                "class centres are those that the servers hold now: ahead of %s if the run was killed later, behind it "
                "if a server went back to an old save (durability = 'save')",
                checkpoint.name,
            )

    def check_new(self) -> None:
        """ValueError where servers have rows already and the run is a new one; collective."""
        rows = self._rows() if self.servers else 0
        if rows:
            raise ValueError(
                f"head.store: the servers {self.servers} hold {rows} classes of another run; give servers with new "
                "folders, or the --out of that run to go on with it"
            )

    def close(self) -> None:
        if self.servers:
            self.head.store.close()  # type: ignore[attr-defined]

    def _rows(self) -> int:
        """Of all servers, before any rank has made one; collective."""

        def count() -> int:
            stats = self.head.store.stats() if self.head.comm.rank == 0 else []  # type: ignore[attr-defined]
            return sum(each["tables"][TABLE]["rows"] for each in stats)

        return together(self.head.comm, "ask the servers", count)[0]

    def _of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"
