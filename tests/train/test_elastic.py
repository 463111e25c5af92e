"""Runs that lose ranks, real ones: killed, hung, cut off; they go on from their checkpoint with what is left."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plsc.train.elastic import ranks_left, run_again
from plsc.train.launch import Outcome

ROOT = Path(__file__).resolve().parents[2]
USER = """
import os, time
from torch import nn
from plsc.data import Synthetic

class Net(nn.Module):
    def __init__(self, embedding_size, *, image_size, in_channels):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, embedding_size))

    def forward(self, images):
        time.sleep(float(os.environ.get("DELAY", "0")) * self.training)
        return self.layers(images)

def data(path, *, image_size, channels):
    return Synthetic(96, 8, image_size=image_size, channels=channels)
"""
RECIPE = """
epochs = 5
batch_size = 12
log_every = 1
save_every = 5
timeout = 10.0
export = false
[data]
kind = "user:data"
image_size = 8
channels = 1
workers = 0
[model]
backbone = "user:Net"
embedding_size = 8
[head]
margin = "cosface"
margin_args = { scale = 16.0 }
[optim]
lr = 0.05
[eval]
task = "none"
"""
STEPS = 40


# ---- when to begin again, and with how many


def again(outcomes: list[tuple[int, str]], *, nproc: int = 4, max_restarts: int = 9, stopped: bool = False) -> Any:
    """Runs through (exit code, newest checkpoint after it); the worlds started, the exit code, what was said."""
    worlds: list[int] = []
    said: list[str] = []
    checkpoints = [""]

    def start(world: int) -> Outcome:
        code, newest = outcomes[len(worlds)]
        worlds.append(world)
        checkpoints.append(newest)
        return Outcome(code, "error: rank 1 was ended by SIGKILL", stopped)

    outcome = run_again(
        start,
        nproc,
        max_restarts=max_restarts,
        final_codes=(2, 130),
        newest=lambda: checkpoints[-1] or None,
        batch_parts=12,
        say=said.append,
    )
    return worlds, outcome.code, said


def test_a_lost_rank_is_replaced() -> None:
    worlds, code, said = again([(137, "step_5"), (1, "step_10"), (0, "step_40")])
    assert worlds == [4, 4, 4] and code == 0
    assert said[0] == "error: rank 1 was ended by SIGKILL\nrestart 1 of 9 on 4 ranks, from step_5"


def test_a_second_loss_without_a_checkpoint_takes_ranks_away() -> None:
    worlds, code, said = again([(137, ""), (137, ""), (137, ""), (137, ""), (0, "step_40")])
    assert worlds == [4, 4, 3, 2, 1] and code == 0
    assert said[0].endswith("on 4 ranks, from the start, for there is no checkpoint yet")
    worlds, _, _ = again([(137, ""), (137, ""), (137, "a"), (137, "b"), (137, "b"), (0, "")], nproc=12)
    assert worlds == [12, 12, 6, 6, 6, 6]  # 11 to 7 ranks do not divide the batch; 6 get further


@pytest.mark.parametrize("code", [2, 130])
def test_what_would_only_come_again_ends_the_run(code: int) -> None:
    assert again([(code, "")])[:2] == ([4], code)


def test_a_run_that_was_stopped_stays_so() -> None:
    assert again([(143, "")], stopped=True)[:2] == ([4], 143)


def test_restarts_are_counted() -> None:
    worlds, code, said = again([(1, "a"), (1, "b"), (1, "c")], max_restarts=2)
    assert len(worlds) == 3 and code == 1 and len(said) == 2
    assert again([(1, "a")], max_restarts=0)[:2] == ([4], 1)


def test_ranks_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ranks_left(most, 12) for most in (12, 11, 5, 1, 0)] == [12, 6, 4, 1, 1]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert ranks_left(8, 12) == 3


# ---- real processes


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "user.py").write_text(USER)
    (folder / "run.toml").write_text(RECIPE)
    return folder / "run.toml"


def environment(**more: str) -> dict[str, str]:
    place = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PLSC_DEBUG")
    kept = {name: value for name, value in os.environ.items() if name not in place}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def losses(out: Path) -> dict[int, float]:
    if not (out / "metrics.jsonl").is_file():
        return {}
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def wait_until(true: Callable[[], bool], seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank_of(launcher: int, rank: int) -> int:
    """The process that the launcher has started as this rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
    raise ProcessLookupError(rank)


@contextlib.contextmanager
def training(recipe: Path, out: Path, *flags: str, delay: str = "0.1") -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "plsc.cli", "train", str(recipe), "--nproc", "2", "--out", str(out), *flags]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": recipe.parent}
    process = subprocess.Popen(words, env=environment(DELAY=delay), **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    out = tmp_path_factory.mktemp("whole")
    with training(recipe, out, delay="0") as process:
        _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return losses(out)


@pytest.mark.slow
def test_a_killed_and_a_hung_rank_are_named_and_replaced(
    recipe: Path, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """With the same losses as if nothing had happened, bit for bit."""
    out = tmp_path / "run"
    with training(recipe, out, "--max-restarts", "2") as process:
        wait_until(lambda: max(losses(out), default=0) >= 7 or process.poll() is not None)
        os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        wait_until(lambda: max(losses(out), default=0) < 7 or process.poll() is not None)  # it has begun again
        wait_until(lambda: max(losses(out), default=0) >= 16 or process.poll() is not None)
        os.kill(rank_of(process.pid, 0), signal.SIGSTOP)
        printed, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    first, restarted, second, again = errors.splitlines()
    assert first.startswith("error: rank 1 was ended by SIGKILL")
    assert re.match(r"restart 1 of 2 on 2 ranks, from \S+step_00000005", restarted)
    assert "rank 0, which holds it, is gone or hangs" in second and "restart 2 of 2 on 2 ranks" in again
    assert printed.count("resumed at step") == 2 and losses(out) == undisturbed and len(undisturbed) == STEPS


def laboratory() -> Any:
    """The module benchmarks/lab.py."""
    spec = importlib.util.spec_from_file_location("lab", ROOT / "benchmarks/lab.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "cut off"])
def test_torchrun_goes_on_with_the_hosts_that_are_left(
    fault: str, recipe: Path, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """Two hosts of two ranks; one host dies or drops off the network, the other resumes as a world of two."""
    lab_module = laboratory()
    if (why := lab_module.missing()) is not None:
        pytest.skip(why)
    out = tmp_path / "run"
    with lab_module.Lab(2, mbit=1000) as lab:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"]
        words += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{lab.addresses[0]}:29500"]
        words += ["--rdzv-conf", "last_call_timeout=6,keep_alive_interval=2,keep_alive_max_attempt=3"]
        hosts, logs = [], []
        for host, address in enumerate(lab.addresses):
            logs.append((tmp_path / f"host{host}").open("w+"))
            command = [*words, "--local-addr", address, "-m", "plsc.cli", "train", str(recipe), "--out", str(out)]
            own = environment(DELAY="0.2", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            hosts.append(lab.start(host, command, own, stdout=logs[-1], stderr=subprocess.STDOUT, cwd=recipe.parent))
        wait_until(lambda: max(losses(out), default=0) >= 7 or hosts[0].poll() is not None)
        lab.kill_host(1) if fault == "killed" else lab.cut(1)
        hosts[0].wait(timeout=240)
        logs[0].seek(0)
        text = logs[0].read()
    assert hosts[0].returncode == 0, text[-5000:]
    assert "96 images, 8 classes, 4 ranks" in text and "96 images, 8 classes, 2 ranks" in text
    assert re.search(r"ranks? 2(, 3)? stopped responding|ranks? 3 stopped responding", text), text[-5000:]
    (resumed,) = re.findall(r"resumed at step (\d+) of 40", text)
    assert int(resumed) in (5, 10)
    got = losses(out)
    assert list(got) == list(range(1, STEPS + 1))
    assert got == pytest.approx(undisturbed, rel=1e-4)  # other sums of floats, the same samples
