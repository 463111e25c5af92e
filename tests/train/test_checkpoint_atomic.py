"""Checkpoints are whole or not there: full disks, deaths at every stage, torn directories, retention."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plsc.comm import Communicator, Shard, mark, run_ranks, world
from plsc.train import storage
from plsc.train.checkpoint import CheckpointError, Checkpoints, load, save

REPOSITORY = Path(__file__).resolve().parents[2]


def parts(value: float = 0.0, comm: Communicator | None = None) -> dict[str, Any]:
    """A module that is whole on every rank and one that is cut, all of one value."""
    whole, cut = nn.Linear(3, 2), nn.Linear(3, 8, bias=False)
    shard = Shard.of(8, comm or world())
    cut.weight = mark(nn.Parameter(torch.empty(shard.size, 3)), shard)
    for param in (*whole.parameters(), *cut.parameters()):
        nn.init.constant_(param, value)
    return {"backbone": whole, "head": cut}


def all_are(modules: dict[str, Any], value: float) -> bool:
    return all(bool((param == value).all()) for module in modules.values() for param in module.parameters())


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


def test_checkpoints_keep_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"

    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(folder, keep=2, comm=comm)
        assert checkpoints.load(**parts(comm=comm)) is None and checkpoints.latest() is None
        comm.barrier()
        for step in (5, 10, 120):
            path = checkpoints.save(step, {"step": step}, **parts(step, comm))
        assert path.name == "step_00000120" and checkpoints.latest() == path
        assert list(checkpoints.steps()) == [10, 120]
        live = parts(comm=comm)
        resumed = checkpoints.load(**live)
        assert resumed is not None and (resumed.path, resumed.step, resumed.extra) == (path, 120, {"step": 120})
        assert all_are(live, 120)
        with pytest.raises(ValueError, match="step_00000120 holds a checkpoint already"):
            checkpoints.save(120, **live)
        checkpoints.save(7, **live)  # a run that went back: what was just saved stays
        assert list(checkpoints.steps()) == [7, 10, 120]

    run_ranks(3, body)
    assert names(folder) == ["latest", "step_00000007", "step_00000010", "step_00000120"]
    assert (folder / "latest").read_text() == "step_00000007\n"
    with pytest.raises(ValueError, match="keep: got 0"):
        Checkpoints(folder, keep=0)


def test_save_refuses_a_directory_in_use(tmp_path: Path) -> None:
    save(tmp_path / "a", **parts())
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        save(tmp_path / "a", **parts())
    (tmp_path / "b").mkdir()
    save(tmp_path / "b", **parts())  # empty: fine
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        save(tmp_path / "c", **parts())
    assert names(tmp_path) == ["a", "b", "c"]


def test_torn_directories_are_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    paths = [checkpoints.save(step, **parts(step)) for step in range(1, 6)]
    (paths[4] / "metadata.json").unlink()
    text = (paths[3] / "metadata.json").read_text()
    (paths[3] / "metadata.json").write_text(text[: len(text) // 2])
    data = paths[2] / "rank_00000.safetensors"
    os.truncate(data, data.stat().st_size - 1)
    (paths[1] / "rank_00000.safetensors").unlink()
    (tmp_path / ".tmp-step_00000009-0123abcd").mkdir()
    (tmp_path / "step_00000077").mkdir()
    assert checkpoints.latest() == paths[0]
    live = parts()
    resumed = checkpoints.load(**live)
    assert resumed is not None and resumed.step == 1 and all_are(live, 1)
    for path, message in ((paths[4], "no checkpoint"), (paths[3], "is damaged"), (paths[2], "bytes, expected")):
        with pytest.raises(ValueError, match=message):
            load(path, **live)
    assert all_are(live, 1)


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, **parts())
    file = checkpoints.save(2, **parts()) / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": 2}))
    with pytest.raises(ValueError, match="has checkpoint format 2, this plsc reads up to 1: a newer plsc wrote it"):
        checkpoints.load(**parts())  # not silently step 1


@pytest.mark.parametrize("file", ["rank_00002.safetensors", ".tmp-metadata.json", "rank_00000.safetensors"])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    run_ranks(4, lambda comm: save(tmp_path / "step_00000001", comm=comm, **parts(1, comm)))
    inner = storage.write_durably

    def full(path: Path, pieces: Any) -> int:
        if path.name == file:
            inner(path, [next(iter(pieces))])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return inner(path, pieces)

    monkeypatch.setattr(storage, "write_durably", full)
    failing = 2 if "2" in file else 0

    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, keep=1, comm=comm)
        live = parts(2, comm)
        with pytest.raises(CheckpointError, match=rf"rank {failing}: OSError: .*No space left on device"):
            checkpoints.save(2, **live)
        assert names(tmp_path) == ["step_00000001"]
        assert checkpoints.load(**live) is not None and all_are(live, 1)

    run_ranks(4, body)


class Killed(BaseException):
    """Stands for a death of the process: nothing cleans up after it."""


@pytest.mark.parametrize("where", ["write_durably", "rename", "replace"])
def test_a_death_while_saving_leaves_the_previous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    save(tmp_path / "step_00000001", **parts(1))

    def die(*args: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(storage if where == "write_durably" else os, where, die)
        with pytest.raises(Killed):
            Checkpoints(tmp_path).save(2, **parts(2))
    assert sum(name.startswith(".tmp-") for name in names(tmp_path)) == 1
    checkpoints, live = Checkpoints(tmp_path), parts()
    assert checkpoints.latest() == tmp_path / "step_00000001"
    checkpoints.load(**live)
    assert all_are(live, 1)
    (tmp_path / ".tmp-mine").mkdir()
    checkpoints.save(2, **live)  # cleans up after the dead run, and only after that
    assert names(tmp_path) == [".tmp-mine", "latest", "step_00000001", "step_00000002"]


# ---- processes


KILLED = """
import os, sys
from pathlib import Path
from torch import nn
from plsc.train import storage
from plsc.train.checkpoint import Checkpoints

point = sys.argv[2]
module = nn.Linear(3, 2)
checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, module=module)

def die(*args):
    os.kill(os.getpid(), 9)

inner = storage.write_durably
def half(path, pieces):
    pieces = list(pieces)
    inner(path, pieces[:-1] + [pieces[-1][:-1]])
    die()

if point == "data":
    storage.write_durably = half
elif point == "pointer":
    inner_replace, os.replace = os.replace, lambda a, b: die() if Path(b).name == "latest" else inner_replace(a, b)
else:
    setattr(os, point, die)
checkpoints.save(2, module=module)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("point", "newest"), [("data", 1), ("replace", 1), ("rename", 1), ("pointer", 2)])
def test_kill_9_leaves_a_whole_checkpoint(tmp_path: Path, point: str, newest: int) -> None:
    """Killed amid the data, before the metadata, before the commit, and after it."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), point], env=environment, timeout=120)
    assert done.returncode == -9
    checkpoints = Checkpoints(tmp_path, keep=1)
    resumed = checkpoints.load(module=nn.Linear(3, 2))
    assert resumed is not None and resumed.step == newest
    checkpoints.save(3, module=nn.Linear(3, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000003"]


PROCESSES = """
import sys
from pathlib import Path
import torch
from torch import nn
from plsc.comm import Shard, connect, mark
from plsc.train import storage
from plsc.train.checkpoint import CheckpointError, load, save

folder = Path(sys.argv[1])
comm = connect("gloo", timeout=60.0)
shard = Shard.of(5, comm)

def head(value):
    module = nn.Linear(3, 5, bias=False)
    module.weight = mark(nn.Parameter(value[shard.start : shard.stop].clone()), shard)
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

module, optimizer = head(torch.arange(15.0).view(5, 3))
module.weight.grad = torch.ones(shard.size, 3)
optimizer.step()
save(folder / "processes", step=3, head=module, optimizer=optimizer)
fresh, resumed = head(torch.zeros(5, 3))
load(folder / "processes", head=fresh, optimizer=resumed)
assert torch.equal(fresh.weight, module.weight)
assert torch.equal(resumed.state[fresh.weight]["momentum_buffer"], module.weight.grad)
if comm.rank == 1:
    def full(path, pieces):
        raise OSError(28, "No space left on device")
    storage.write_durably = full
try:
    save(folder / "failed", head=module)
except CheckpointError as error:
    assert "rank 1: OSError: [Errno 28] No space left on device" in str(error)
    assert not (folder / "failed").exists()
    print("kept")
comm.close()
"""


@pytest.mark.slow
def test_ranks_that_are_processes(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESSES, str(tmp_path)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = [rank.communicate(timeout=180)[0] for rank in ranks]
    assert all(text.strip().endswith("kept") for text in texts), "\n".join(texts)
    weight = nn.Linear(3, 5, bias=False)
    load(tmp_path / "processes", head=weight)
    assert torch.equal(weight.weight, torch.arange(15.0).view(5, 3) - 0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["processes"]
