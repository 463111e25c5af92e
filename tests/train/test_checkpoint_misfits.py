"""Checkpoints that do not fit are refused, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from plsc.comm import Communicator, run_ranks
from plsc.train.checkpoint import load, save

from .checkpoint_runs import ADAMW, Backbone, Head, Run, Stateful, same, saved_run


def other_dtype(run: Run) -> dict[str, Any]:
    run.backbone.half()
    return {"backbone": run.backbone}


def other_names(run: Run) -> dict[str, Any]:
    return {"backbone": nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))}


def renamed_optimizer(run: Run) -> dict[str, Any]:
    return {"trunk": run.backbone, "head": run.head, "optimizer": run.optimizer}


def one_group(run: Run) -> dict[str, Any]:
    return {**run.parts, "optimizer": SGD([*run.backbone.parameters(), *run.head.parameters()], lr=1.0)}


def other_optimizer(run: Run) -> dict[str, Any]:
    return {**run.parts, "optimizer": ADAMW([*run.backbone.parameters(), *run.head.parameters()])}


def other_state_dtype(run: Run) -> dict[str, Any]:
    run.train()
    for state in run.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    return run.parts


MISFITS: dict[str, tuple[Callable[[Run], dict[str, Any]], str]] = {
    "dtype": (other_dtype, r"backbone/conv.bias: the checkpoint has torch.float32, the live tensor torch.float16"),
    "shape": (
        lambda run: {"backbone": Backbone(width=5)},
        r"backbone/conv.weight: the checkpoint has shape \[3, 2, 1, 1\], the live tensor \[5, 2, 1, 1\]",
    ),
    "names": (
        other_names,
        r"backbone is not what was saved \(not in the checkpoint: backbone/0.bias, .* and 3 more; only in the check",
    ),
    "dimensions": (
        lambda run: {"head": Head(run.comm, 10, dim=6)},
        r"head/weight: the checkpoint has shape \[10, 4\], the live tensor \[10, 6\]",
    ),
    "centers": (
        lambda run: {"head": Head(run.comm, 10, centers=2)},
        r"head/weight: the checkpoint has shape \[10, 4\], the live tensor \[10, 2, 4\]",
    ),
    "more classes": (
        lambda run: {"head": Head(run.comm, 12)},
        r"the checkpoint has 10 classes, the head has 12; pass extend_classes / --head.extend-classes to keep the "
        r"first 10 and initialise the rest$",
    ),
    "fewer classes": (
        lambda run: {"head": Head(run.comm, 8)},
        r"the checkpoint has 10 classes, the head has 8; classes are never dropped: build it with 10 or more$",
    ),
    "missing part": (lambda run: {"loader": Stateful({})}, r"no part 'loader'; it has backbone, head, optimizer"),
    "kind": (lambda run: {"head": Stateful({})}, r"head: the checkpoint has a part of kind module, got stateful"),
    "no state": (lambda run: {"head": 3}, r"head: got int, expected a module, an optimizer, or an object with "),
    "optimizer": (other_optimizer, r"optimizer: the checkpoint has the state of SGD, got AdamW; use the same"),
    "groups": (one_group, r"optimizer: the checkpoint has 2 parameter groups, got 1"),
    "parameters": (renamed_optimizer, r"optimizer is not what was saved \(not in the checkpoint: trunk/conv.bias"),
    "stranger": (
        lambda run: {"head": run.head, "optimizer": run.optimizer},
        r"optimizer: parameter 0 of group 0, shape \[3, 2, 1, 1\], is of no module given here; pass its module",
    ),
    "state dtype": (
        other_state_dtype,
        r"optimizer/backbone/conv.weight/momentum_buffer: the checkpoint has torch.float32, the live .* torch.float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_named_and_change_nothing(tmp_path: Path, name: str) -> None:
    change, message = MISFITS[name]
    saved_run(tmp_path / "a", world_size=2)

    def body(comm: Communicator) -> None:
        run = Run(comm, seed=900)
        parts = change(run)
        modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        before, state = run.whole(), [{k: v.clone() for k, v in m.state_dict().items()} for m in modules]
        options = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "a", comm=comm, **parts)
        assert same(run.whole(), before)
        assert all(same(dict(m.state_dict()), old) for m, old in zip(modules, state, strict=True))
        assert options == [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]

    run_ranks(3, body)


def test_a_misfit_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    saved_run(tmp_path / "a", world_size=2)

    def body(comm: Communicator) -> None:
        backbone = Backbone(width=5 if comm.rank == 1 else 3, seed=70)
        before = {name: value.clone() for name, value in backbone.state_dict().items()}
        with pytest.raises(ValueError, match=r"could not load .*: rank 1: .*shape"):
            load(tmp_path / "a", comm=comm, backbone=backbone)
        assert same(dict(backbone.state_dict()), before)

    run_ranks(3, body)


def test_ranks_must_save_the_same_thing(tmp_path: Path) -> None:
    def differing_state(comm: Communicator) -> None:
        save(tmp_path / "a", comm=comm, loader=Stateful({"position": comm.rank // 2}))

    def differing_step(comm: Communicator) -> None:
        save(tmp_path / "a", comm=comm, step=comm.rank, loader=Stateful({}))

    def differing_parts(comm: Communicator) -> None:
        parts: dict[str, Any] = {"odd" if comm.rank == 2 else "even": Stateful({})}
        save(tmp_path / "a", comm=comm, **parts)

    def differing_shape(comm: Communicator) -> None:
        save(tmp_path / "a", comm=comm, backbone=Backbone(width=3 + comm.rank % 2))

    def lost_state(comm: Communicator) -> None:
        run = Run(comm).train()
        if comm.rank == 2:
            run.optimizer.state.pop(run.backbone.conv.weight)
        save(tmp_path / "a", comm=comm, **run.parts)

    for body, message in (
        (differing_state, "state of loader differs between rank 0 and rank 2"),
        (differing_step, "different steps: rank 0 has 0, rank 1 has 1"),
        (differing_parts, "different parts"),
        (differing_shape, "backbone/conv.weight differs between ranks: whole.* on 0, whole.* on 1"),
        (lost_state, "conv.weight/momentum_buffer exists on rank 0 but not on rank 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run_ranks(4, body)
        assert list(tmp_path.iterdir()) == []
