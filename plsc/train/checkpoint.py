"""Checkpoints that any number of ranks can load, written whole or not at all: save, load, and a directory of them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from plsc.comm import Communicator, FailedTogether, together, world
from plsc.train.parts import Cell, Part, Restore, Saved, collect, from_json, restore, to_json
from plsc.train.storage import (
    METADATA_NAME,
    RowShard,
    SafetensorsReader,
    SafetensorsWriter,
    TornCheckpointError,
    make_directories,
    replace_durably,
    sync_directory,
)

logger = logging.getLogger(__name__)


class CheckpointError(FailedTogether):
    """A checkpoint could not be written or read (disk full, no permission, ...); raised on every rank alike."""


_together = partial(together, error=CheckpointError)


# ---- saving


def save(
    path: str | os.PathLike[str],
    *,
    comm: Communicator | None = None,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    **parts: object,
) -> None:
    """Writes a checkpoint of the named parts to a new directory: complete and on the disk, or not there at all.

    Parts are modules, optimizers, and objects with state_dict() and load_state_dict() (scaler, loader, schedule); cut
    parameters are saved by class, so any number of ranks can load them. A tensor that every rank has is rank 0's.
    A collective call. Errors on one rank are raised on all: ValueError for the call, CheckpointError for the disk.
    """
    target = Path(path).absolute()
    stale = re.compile(rf"\.tmp-{re.escape(target.name)}-[0-9a-f]{{8}}")
    _write(target, comm or world(), step=step, extra=extra, parts=parts, stale=stale)


@dataclass(frozen=True)
class _Proposal:
    """What a rank would write; all ranks see those of all and draw the same conclusion."""

    plan: SavePlan
    step: int
    digests: dict[str, str]
    may_lack: tuple[str, ...]
    token: str


def _write(
    target: Path,
    comm: Communicator,
    *,
    step: int,
    extra: Mapping[str, Any] | None,
    parts: Mapping[str, object],
    stale: re.Pattern[str],
) -> None:
    # Whole tensors all come from rank 0, not spread over ranks: where replicas differ (batch statistics, replicas
    # between two averagings) what is saved is one of them, not a mixture.
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    writer = SafetensorsWriter(target)

    def propose() -> _Proposal:
        collected = collect(parts)
        cells = {name: cell for part in collected.values() for name, cell in part.cells.items()}
        writer.about = _about(comm, step, extra, collected)
        planner.set_up_planner({name: cell.stored() for name, cell in cells.items()}, None, comm.rank == 0)
        return _Proposal(
            writer.prepare_local_plan(planner.create_local_plan()),
            step,
            {name: part.digest() for name, part in collected.items()},
            tuple(prefix for part in collected.values() for prefix in part.may_lack),
            secrets.token_hex(4),
        )

    proposals = _together(comm, f"save {target}", propose)
    temporary = target.with_name(f".tmp-{target.name}-{proposals[0].token}")
    planned: list[tuple[SavePlan, Metadata]] = []

    def prepare() -> None:
        _check_alike(proposals)
        plans, metadata = planner.create_global_plan([proposal.plan for proposal in proposals])
        planned.append((planner.finish_plan(writer.prepare_global_plan(plans)[comm.rank]), metadata))
        writer.reset(temporary)
        if comm.rank == 0:
            _make_room(target, stale)
            make_directories(temporary)

    def write() -> list[WriteResult]:
        if not temporary.is_dir():
            raise OSError(f"{temporary} cannot be seen here; all ranks need one shared file system")
        return writer.write_data(planned[0][0], planner).wait()

    def commit() -> None:
        if comm.rank == 0:
            writer.finish(planned[0][1], results)
            os.rename(temporary, target)
            sync_directory(target.parent)

    try:
        _together(comm, f"save {target}", prepare)
        results = _together(comm, f"write {target}", write)
        _together(comm, f"commit {target}", commit)
    except (ValueError, CheckpointError):  # agreed: no rank is writing any more
        if comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        comm.barrier()  # whoever catches the error finds the directory as it was
        raise
    if comm.rank == 0:
        logger.info("saved step %d to %s", step, target)


def _about(
    comm: Communicator, step: int, extra: Mapping[str, Any] | None, collected: Mapping[str, Part]
) -> dict[str, Any]:
    found: dict[str, Tensor] = {}
    about = {
        "plsc_version": getattr(sys.modules["plsc"], "__version__", "unknown"),
        "torch_version": str(torch.__version__),
        "step": step,
        "world_size": comm.world_size,
        "extra": to_json(dict(extra or {}), "extra", found),
        "parts": {name: part.description() for name, part in collected.items()},
        "cut": sorted(name for part in collected.values() for name, cell in part.cells.items() if cell.shard),
    }
    if found:
        raise ValueError(f"{next(iter(found))}: got a tensor, expected plain numbers and words in extra")
    return about


def _check_alike(proposals: list[_Proposal]) -> None:
    """All ranks must save the same step of the same things: what differs cannot be restored on another world."""
    first = proposals[0]
    known: dict[str, tuple[int, str]] = {}  # tensor -> a rank that has it, and what it is there
    names = [{item.index.fqn for item in proposal.plan.items} for proposal in proposals]
    for rank, proposal in enumerate(proposals):
        if proposal.step != first.step:
            raise ValueError(f"ranks save different steps: rank 0 has {first.step}, rank {rank} has {proposal.step}")
        if proposal.digests.keys() != first.digests.keys():
            raise ValueError(
                f"ranks save different parts: {sorted(first.digests)} on rank 0, {sorted(proposal.digests)} on {rank}"
            )
        for name, digest in proposal.digests.items():
            if digest != first.digests[name]:
                raise ValueError(
                    f"the state of {name} differs between rank 0 and rank {rank}; what is saved must be agreed"
                )
        for item in proposal.plan.items:
            assert item.tensor_data is not None, "states hold tensors only"
            cut = "cut" if item.type is WriteItemType.SHARD else "whole"
            what = f"{cut}, {item.tensor_data.properties.dtype}, shape {list(item.tensor_data.size)}"
            other, before = known.setdefault(item.index.fqn, (rank, what))
            if what != before:
                raise ValueError(f"{item.index.fqn} differs between ranks: {before} on {other}, {what} on {rank}")
    for name, (holder, what) in known.items():
        for rank, proposal in enumerate(proposals):
            if what.startswith("whole") and name not in names[rank] and not name.startswith(proposal.may_lack):
                raise ValueError(f"{name} exists on rank {holder} but not on rank {rank}")


def _make_room(target: Path, stale: re.Pattern[str]) -> None:
    """Refuses a directory that is in use, and removes what a run that died while saving left behind."""
    if (target / METADATA_NAME).exists():
        raise ValueError(f"{target} holds a checkpoint already; write each one to a directory of its own")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty; a checkpoint is a directory of its own")
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        if stale.fullmatch(path.name):
            logger.warning("removing %s, left by a run that died while saving", path)
            shutil.rmtree(path, ignore_errors=True)


# ---- loading


def load(
    path: str | os.PathLike[str],
    *,
    comm: Communicator | None = None,
    extend_classes: bool = False,
    **parts: object,
) -> dict[str, Any]:
    """Loads a checkpoint into live parts, on any number of ranks, and returns its `extra`.

    Parts that are not named stay in the checkpoint. Names, shapes, dtypes, the number of classes and the kind of the
    optimizer must fit, else ValueError on every rank before anything is changed; other settings of modules (the margin,
    sample_rate, another activation, ...) may be meant and are a warning. extend_classes: the live head may have
    more classes: the rows of the new ones stay as initialised, and their optimizer state is zero. A collective call.
    """
    comm = comm or world()
    reader = SafetensorsReader(path)
    restores: list[Restore] = []
    saved: list[Metadata] = []

    def prepare() -> int:
        saved.append(reader.read_metadata())
        restores.extend(_compare(reader, saved[0], comm=comm, extend_classes=extend_classes, parts=parts))
        return int(reader.about["step"])

    steps = _together(comm, f"load {path}", prepare)
    if len(set(steps)) > 1:
        raise ValueError(f"ranks read different checkpoints: steps {steps}; all ranks must load the same")
    _apply_plain(comm, restores)

    def read() -> None:
        cells = [pair for one in restores for pair in one.targets.items()]
        state = {name: _target(name, cell, saved[0]) for name, cell in cells}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, saved[0], comm.rank == 0)
        reader.read_data(planner.create_local_plan(), planner).wait()

    def apply() -> None:
        for one in restores:
            if not one.is_plain:
                one.apply()

    with torch.no_grad():
        _together(comm, f"read {path} (the parts are partly overwritten)", read)
        _together(comm, f"take over {path} (the parts are partly overwritten)", apply)
    extra: dict[str, Any] = from_json(reader.about["extra"], {})
    if comm.rank == 0:
        logger.info("loaded step %d from %s, saved by %d ranks", steps[0], path, reader.about["world_size"])
        if differs := [text for one in restores for text in one.differs]:
            more = f"; and {len(differs) - 4} more" if len(differs) > 4 else ""
            logger.warning("%s was saved with other settings: %s%s; right if meant", path, "; ".join(differs[:4]), more)
    return extra


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint says of itself: step, extra, world_size at saving, versions, kind and state of each part."""
    about: dict[str, Any] = SafetensorsReader(path).read_json()["about"]
    return {**about, "extra": from_json(about.get("extra", {}), {})}


def _compare(
    reader: SafetensorsReader,
    metadata: Metadata,
    *,
    comm: Communicator,
    extend_classes: bool,
    parts: Mapping[str, object],
) -> list[Restore]:
    """How each part will be restored; one ValueError with all that does not fit."""
    about = reader.about
    if "parts" not in about:
        raise ValueError(f"{reader.path} holds plain tensors, no parts; read it with torch.distributed.checkpoint.load")
    tensors: Any = metadata.state_dict_metadata
    same_torch = about.get("torch_version") == str(torch.__version__)
    saved = Saved(tensors, frozenset(about["cut"]), about["parts"], comm, extend_classes, same_torch)
    restores = [restore(part, saved) for part in collect(parts).values()]
    problems = list(dict.fromkeys(problem for one in restores for problem in one.problems))
    if problems:
        more = f"; and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ValueError(f"{reader.path} does not fit: {'; '.join(problems[:6])}{more}")
    return restores


def _target(name: str, cell: Cell, metadata: Metadata) -> Tensor:
    """The live tensor as the place for the saved rows; where classes are new, the rest of it is left or zeroed."""
    if cell.shard is None:
        return cell.tensor
    tensors: Any = metadata.state_dict_metadata
    total = tensors[name].size[0]
    start, stop = min(cell.shard.start, total), min(cell.shard.stop, total)
    if cell.zero_new:
        cell.tensor[stop - start :].zero_()
    return RowShard(cell.tensor[: stop - start], start=start, total=total)


def _apply_plain(comm: Communicator, restores: list[Restore]) -> None:
    """Restores parts without tensors, which may refuse what they are given; if one does, the others are put back."""
    undo: list[tuple[Any, Any]] = []

    def apply() -> None:
        for one in restores:
            if one.is_plain:
                if hasattr(one.part.live, "state_dict"):
                    undo.append((one.part.live, deepcopy(one.part.live.state_dict())))
                one.apply()

    try:
        _together(comm, "restore the parts", apply)
    except (ValueError, CheckpointError):
        for live, before in reversed(undo):
            with contextlib.suppress(Exception):  # the one that refused may refuse this too
                live.load_state_dict(before)
        raise


# ---- a directory of checkpoints


@dataclass(frozen=True)
class Resumed:
    """What Checkpoints.load found."""

    path: Path
    step: int
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run: directories `step_00000120`, of which the newest `keep` are kept.

    The file `latest` names the newest for people and scripts; plsc itself looks at what is whole.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3, comm: Communicator | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep: got {keep}, expected at least 1; the newest checkpoint is never deleted")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self.comm = comm or world()

    def save(self, step: int, extra: Mapping[str, Any] | None = None, **parts: object) -> Path:
        """Saves a step (see `save`), then moves `latest` and deletes the oldest. A collective call."""
        path = self.directory / f"step_{step:08d}"
        stale = re.compile(r"\.tmp-step_\d+-[0-9a-f]{8}")
        _write(path, self.comm, step=step, extra=extra, parts=parts, stale=stale)

        def tidy() -> None:
            if self.comm.rank == 0:
                replace_durably(self.directory / "latest", [f"{path.name}\n".encode()])
                self._delete_old(path)

        _together(self.comm, f"move {self.directory / 'latest'} (the checkpoint itself is safe)", tidy)
        return path

    def steps(self) -> dict[int, Path]:
        """The committed checkpoints by step, oldest first."""
        found = {}
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            match = re.fullmatch(r"step_(\d+)", path.name)
            if match and (path / METADATA_NAME).is_file():
                found[int(match[1])] = path
        return dict(sorted(found.items()))

    def latest(self) -> Path | None:
        """The newest whole checkpoint; temporary and torn directories do not count."""
        for path in reversed(self.steps().values()):
            try:
                SafetensorsReader(path).read_json()
            except TornCheckpointError as error:
                logger.warning("passing over a torn checkpoint: %s", error)
                continue
            except ValueError:
                pass  # whole, but of a newer format, say: load says so, better than to go on from an older one
            return path
        return None

    def newest_extra(self) -> dict[str, Any] | None:
        """The `extra` of the newest checkpoint, before anything is loaded; None if there is none. A collective call."""
        newest = self.newest()
        return None if newest is None else describe(newest)["extra"]

    def newest(self) -> Path | None:
        """As `latest`; rank 0 chooses for all. A collective call."""
        return _together(
            self.comm, f"look into {self.directory}", lambda: self.latest() if self.comm.rank == 0 else None
        )[0]

    def load(self, *, extend_classes: bool = False, **parts: object) -> Resumed | None:
        """Loads the newest checkpoint (see `load`); None if there is none. Rank 0 chooses. A collective call."""
        newest = self.newest()
        if newest is None:
            return None
        extra = load(newest, comm=self.comm, extend_classes=extend_classes, **parts)
        return Resumed(newest, int(newest.name.removeprefix("step_")), extra)

    def _delete_old(self, just_saved: Path) -> None:
        """Renames before it deletes, so that a half-deleted directory is never taken for a checkpoint."""
        for path in list(self.steps().values())[: -self.keep]:
            if path == just_saved:
                continue
            trash = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
            try:
                os.rename(path, trash)
                shutil.rmtree(trash)
            except OSError as error:
                logger.warning("could not delete the old checkpoint %s: %s", path, error)
