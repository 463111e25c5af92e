"""Runs whose class centres lie in a store: they resume to the bit and say what they cannot do."""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plsc.cli import train as train_command
from plsc.comm import LocalCommunicator
from plsc.data.embeddings import read_embeddings
from plsc.ps import AdamW, Momentum, Server, Table
from plsc.train import Trainer
from plsc.train.build import build_head
from plsc.train.class_store import rule_of
from plsc.train.config import EvalConfig, OptimConfig
from plsc.train.run import train

from .short_runs import BASE, change, losses, run

STORED = change(BASE, head={"sample_rate": 0.5, "store": "memory"})


class Servers:
    """Two servers of one table "classes", with folders."""

    def __init__(self, folder: Path, **options: Any) -> None:
        rule = Momentum(momentum=0.9, weight_decay=5e-4)
        made = {"rule": rule, "lr": 0.7, "init": "normal", "locked": True, **options}
        self.all = [
            Server({"classes": Table(8, **made)}, index=index, count=2, folder=folder / str(index), durability="log")
            for index in range(2)
        ]
        self.store = ",".join(server.address for server in self.all)

    def close(self) -> None:
        for server in self.all:
            server.close(save=True)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def rows(trainers: list[Trainer]) -> Tensor:
    return torch.cat([trainer.head.rows(0, trainer.head.shard.size) for trainer in trainers])


@pytest.mark.parametrize("store", ["memory", "file"])
@pytest.mark.parametrize("optim", [{}, {"name": "adamw", "lr": 0.003}], ids=str)
def test_resume_is_bit_for_bit(store: str, optim: dict[str, Any], tmp_path: Path) -> None:
    config = change(STORED, head={"store": store}, optim=optim)
    whole, parts = change(config, out=str(tmp_path / "whole")), change(config, out=str(tmp_path / "parts"), keep=1)
    straight = rows(run(whole, 2))
    run(parts, 2, stop_at=5)
    resumed = rows(run(parts, 2))
    assert torch.equal(straight, resumed) and losses(whole) == losses(parts) and len(losses(whole)) == 16
    assert [path.name for path in (tmp_path / "parts" / "classes").iterdir()] == ["step_00000016"]  # as checkpoints
    assert not list(tmp_path.glob("parts/*.partial"))


@pytest.mark.parametrize("worlds", [(1, 3), (3, 1)], ids=str)
def test_resume_on_another_number_of_ranks(worlds: tuple[int, int], tmp_path: Path) -> None:
    whole, parts = change(STORED, out=str(tmp_path / "whole")), change(STORED, out=str(tmp_path / "parts"))
    run(whole, 1)
    run(parts, worlds[0], stop_at=7)
    stale = tmp_path / "parts" / "classes" / "step_00000009"  # of a run that was killed before its checkpoint
    shutil.copytree(tmp_path / "parts" / "classes" / "step_00000007", stale)
    run(parts, worlds[1])
    expected, got = losses(whole), losses(parts)
    assert list(got) == list(expected)
    np.testing.assert_allclose(list(got.values()), list(expected.values()), rtol=1e-4)


def test_servers_keep_their_rows(tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    """A run that was stopped goes on, to the bit; the servers may have been started again meanwhile."""
    made = [Servers(tmp_path / name) for name in ("whole", "parts")]
    config = [change(STORED, head={"store": each.store}, out=str(tmp_path / f"{i}")) for i, each in enumerate(made)]
    straight = rows(run(config[0], 2))
    stack.callback(made[0].close)
    with pytest.raises(ValueError, match=r"hold 10 classes of another run; give servers with new folders"):
        run(change(config[0], out=str(tmp_path / "new")), 2)
    run(config[1], 2, stop_at=5)
    made[1].close()
    again = Servers(tmp_path / "parts")
    stack.callback(again.close)
    moved = change(config[1], head={"store": again.store})
    with caplog.at_level(logging.WARNING):
        resumed = rows(run(moved, 2))
    assert torch.equal(straight, resumed) and losses(config[0]) == losses(config[1])
    assert "those that the servers hold now: ahead of step_00000005 if" in caplog.text
    empty = Servers(tmp_path / "empty")
    stack.callback(empty.close)
    with pytest.raises(ValueError, match=r"hold no classes, but the run to go on \(step_00000016\) has trained some"):
        run(change(moved, head={"store": empty.store}), 2)
    with pytest.raises(ValueError, match=r"step_00000016 holds no file of save_classes"):
        run(change(moved, head={"store": "memory"}), 2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"init": "zeros"}, "born alike"),
        ({"max_rows": 4096}, "would forget classes"),
        ({"admit_after": 2}, "would forget classes"),
        ({"rule": "adagrad"}, "got rule Momentum"),
    ],
    ids=str,
)
def test_servers_that_do_not_fit(options: dict[str, Any], why: str, tmp_path: Path, stack: ExitStack) -> None:
    made = Servers(tmp_path, **options)
    stack.callback(made.close)
    with pytest.raises(ValueError, match=why):
        build_head(change(STORED, head={"store": made.store}), 10, LocalCommunicator())


def test_rules_are_those_of_the_recipe() -> None:
    assert rule_of(OptimConfig()) == Momentum(momentum=0.9, weight_decay=5e-4)
    ask = OptimConfig(name="adamw", betas=(0.8, 0.9), weight_decay=0.1)
    assert rule_of(ask) == AdamW(weight_decay=0.1, beta1=0.8, beta2=0.9)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head": {"store": "disk"}}, "head.store is 'disk', expected 'memory', 'file', 'file:FOLDER'"),
        ({"head": {"store": "memory:x"}}, "head.store is 'memory:x'"),
        ({"head": {"store": "file:/nowhere"}}, "expected an existing folder"),
        ({"head": {"store": "file:123"}}, "expected an existing folder"),
        ({"head": {"sample_rate": 1.0}}, "needs head.sample_rate below 1, got 1.0"),
        ({"head": {"fused": True}}, "exclude each other"),
        ({"head": {"weight_dtype": "bf16"}}, "needs fused = true"),
        ({"head": {"margin": "linear", "margin_args": {}, "sample_rate": 1.0}}, "takes no sample_rate"),
        ({"optim": {"name": "lars"}}, "got lars with head.store"),
        ({"optim": {"nesterov": True}}, "got sgd with nesterov"),
        ({"optim": {"lr": 0.0}}, "optim.lr is 0.0"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build_head(change(STORED, **changes), 10, LocalCommunicator())


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text(
        "epochs = 2\nbatch_size = 12\nexport = false\n[data]\nkind = 'synthetic'\nimage_size = 16\nchannels = 1\n"
        "num_classes = 10\nnum_samples = 48\nworkers = 0\n[model]\nbackbone = 'plainnet'\nembedding_size = 8\n"
        "[head]\nsample_rate = 0.5\nstore = 'file'\n[optim]\nlr = 0.05\n[eval]\ntask = 'classification'\n"
    )
    out = tmp_path / "run"
    assert train_command([str(tmp_path / "recipe.toml"), "--out", str(out)]) == 0
    assert json.loads((out / "result.json").read_text())["step"] == 8
    assert train_command([str(tmp_path / "recipe.toml"), "--out", str(out), "--plan", "here"]) == 2
    assert "leave one of them out" in capsys.readouterr().err


def test_centres_are_exported(tmp_path: Path) -> None:
    config = change(STORED, out=str(tmp_path), export=True, eval=EvalConfig(task="classification"))
    assert train(config) is not None
    trainer = Trainer(config)
    trainer.resume()
    expected = torch.nn.functional.normalize(rows([trainer])).numpy()
    found = read_embeddings(tmp_path / "export" / "centres.safetensors").embeddings
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
