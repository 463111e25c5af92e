"""Checkpoints of parts with a state of their own: JSON with tensors in it, schedules, tensors cut by class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from plsc.comm import Communicator, Shard, run_ranks
from plsc.train.checkpoint import load, save

from .checkpoint_runs import Run, Stateful, numbers, same


def test_any_json_and_tensors_inside_it(tmp_path: Path) -> None:
    state = {
        "a": [1, 2.5, None, True, "x", (1, (2,))], "b": {3: "int key", "$odd": -1.5, (1, 2): []}, "inf": float("inf"),
        "nested": {"t": numbers(3), "list": [numbers(2, seed=1), torch.tensor(4)]},
    }  # fmt: skip
    save(tmp_path / "a", part=Stateful(state))
    for target in (
        Stateful({}),
        Stateful({"nested": {"t": torch.zeros(3), "list": [torch.zeros(2), torch.tensor(0)]}}),
    ):
        load(tmp_path / "a", part=target)
        nested = target.state.pop("nested")
        assert target.state == {key: state[key] for key in ("a", "b", "inf")}
        assert torch.equal(nested["t"], numbers(3)) and torch.equal(nested["list"][0], numbers(2, seed=1))
        assert nested["list"][1].dtype == torch.int64 and int(nested["list"][1]) == 4
    with pytest.raises(ValueError, match=r"part/x: got set, expected a tensor, None"):
        save(tmp_path / "b", part=Stateful({"x": {1}}))
    with pytest.raises(ValueError, match="extra/x: got a tensor"):
        save(tmp_path / "b", extra={"x": torch.zeros(1)}, part=Stateful({}))
    assert not (tmp_path / "b").exists()


def test_torch_schedules_and_scalers(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        module = nn.Linear(2, 2)
        optimizer = SGD(module.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3], gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        return {"module": module, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}

    first, second = make(), make()
    first["scaler"].load_state_dict({**first["scaler"].state_dict(), "scale": 2.0})
    for _ in range(2):
        first["optimizer"].step()
        first["schedule"].step()
    save(tmp_path / "a", **first)
    load(tmp_path / "a", **second)
    assert second["scaler"].get_scale() == 2.0
    for parts in (first, second):
        parts["optimizer"].step()
        parts["schedule"].step()
        assert parts["schedule"].get_last_lr() == [0.125]


class RowState:
    """Offers tensors cut by class beside a state_dict, as a row-wise optimizer does."""

    def __init__(self, comm: Communicator, classes: int, scale: float) -> None:
        self.shard = Shard.of(classes, comm)
        self.steps = torch.arange(classes)[self.shard.start : self.shard.stop] * int(scale)
        self.value = (numbers(classes, 3) * scale)[self.shard.start : self.shard.stop].clone()
        self.count = int(scale)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def sharded_state(self) -> dict[str, tuple[Tensor, Shard]]:
        return {"steps": (self.steps, self.shard), "value": (self.value, self.shard)}


class Inside(nn.Module):
    """A module that offers cut tensors which are in no state_dict."""

    def __init__(self, state: RowState) -> None:
        super().__init__()
        self.state = state

    def sharded_state(self) -> dict[str, tuple[Tensor, Shard]]:
        return self.state.sharded_state()


def test_sharded_state_is_cut_anew(tmp_path: Path) -> None:
    def write(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(1, 1), Inside(RowState(comm, 7, 3.0)))
        save(tmp_path / "a", comm=comm, rows=RowState(comm, 7, 2.0), model=model)

    def read(comm: Communicator) -> None:
        rows, inner = RowState(comm, 9, 0.0), RowState(comm, 9, 50.0)
        model = nn.Sequential(nn.Linear(1, 1), Inside(inner))
        load(tmp_path / "a", comm=comm, extend_classes=True, rows=rows, model=model)
        assert rows.count == 2
        for state, scale in ((rows, 2.0), (inner, 3.0)):
            steps = torch.cat(comm.gather_objects(state.steps))
            value = torch.cat(comm.gather_objects(state.value))
            assert torch.equal(steps, torch.cat([torch.arange(7) * int(scale), torch.zeros(2, dtype=torch.int64)]))
            assert torch.equal(value, torch.cat([numbers(7, 3) * scale, torch.zeros(2, 3)]))

    run_ranks(3, write)
    run_ranks(2, read)
    run_ranks(5, read)


def test_a_part_that_refuses_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    def refuse(state: dict[Any, Any]) -> None:
        raise ValueError(f"the loader has other data than {state['data']}")

    def body(comm: Communicator) -> None:
        run = Run(comm).train()
        save(tmp_path / "a", comm=comm, one=Stateful({"n": 1}), loader=Stateful({"data": "old"}), **run.parts)
        one, loader = Stateful({"n": 2}), Stateful({"data": "new"}, refuse if comm.rank == 1 else None)
        run.train()
        before = run.whole()
        with pytest.raises(ValueError, match="rank 1: the loader has other data than old"):
            load(tmp_path / "a", comm=comm, one=one, loader=loader, **run.parts)
        assert one.state == {"n": 2} and loader.state == {"data": "new"} and same(run.whole(), before)

    run_ranks(2, body)
