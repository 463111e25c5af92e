"""A small recipe, the user's module it names, and commands started as from a terminal: for tests of the commands."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = """
import os, sys, time
import torch
from torch import nn
from plsc.data import Synthetic

class DropNet(nn.Module):
    def __init__(self, embedding_size, *, image_size, in_channels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(in_channels * image_size**2, 32), nn.ReLU(), nn.Dropout(0.4),
            nn.Linear(32, embedding_size),
        )
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        if self.training:
            time.sleep(float(os.environ.get("DELAY", "0")))
        if self.training and os.environ.get("FAIL_RANK") == os.environ.get("RANK", "0") and self.calls == 3:
            raise {"user": ValueError, "bug": KeyError}[os.environ["FAIL"]]("the images are upside down")
        return self.layers(images)

def data(path, *, image_size, channels):
    return Synthetic(96, 8, image_size=image_size, channels=channels)
"""
RECIPE = """
epochs = 5
batch_size = 12
log_every = 1
save_every = 10
timeout = 120.0
[data]
kind = "parts:data"
image_size = 16
channels = 1
workers = 1
crop = 1
[model]
backbone = "parts:DropNet"
embedding_size = 8
[head]
margin = "cosface"
margin_args = { scale = 16.0 }
[optim]
lr = 0.05
[eval]
num_pairs = 40
folds = 2
"""
STEPS = 40  # 96 images in batches of 12, five times


def losses(out: Path) -> dict[int, float]:
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def kept(out: Path) -> list[int]:
    """Steps of the checkpoints, oldest first."""
    return sorted(int(path.name.removeprefix("step_")) for path in (out / "checkpoints").glob("step_*"))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Started:
    """A command under way in a session of its own, as from a terminal."""

    def __init__(self, recipe: Path, command: str, *args: str, **environment: str) -> None:
        code = f"import sys; from plsc.cli import {command}; sys.exit({command}())"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        for name in ("RANK", "WORLD_SIZE", "PLSC_DEBUG"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *args],
            env=env,
            cwd=recipe.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell that runs tests in the background has Ctrl-C ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # type: ignore[arg-type]
        )

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; all that it had started is gone then."""
        seen = self.family() if self.process.poll() is None else {}
        try:
            out, err = self.process.communicate(timeout=150)
        finally:
            self.kill_all(seen)
        wait_until(lambda: not any(alive(pid) for pid in seen))
        return self.process.returncode, out, err

    def family(self) -> dict[int, str]:
        """Living descendants, with the RANK each was started with."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        found, rest = {}, [self.process.pid]
        while rest:
            parent = rest.pop()
            for pid in [pid for pid, its in parents.items() if its == parent and alive(pid)]:
                rest.append(pid)
                with contextlib.suppress(OSError):
                    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    found[pid] = next((word[5:].decode() for word in environ if word.startswith(b"RANK=")), "")
        return found

    def rank(self, rank: int) -> int:
        """The process of a rank; the reading processes it has forked have higher ids."""
        return min(pid for pid, its in self.family().items() if its == str(rank))

    def wait_for_step(self, out: Path, step: int) -> None:
        def reached() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"ended early: {self.process.communicate()}")
            return (out / "metrics.jsonl").is_file() and max(losses(out), default=0) >= step

        wait_until(reached)

    def kill_all(self, pids: dict[int, str]) -> None:
        """Only where a test has failed is anything left to kill."""
        if self.process.poll() is None:
            for pid in [self.process.pid, *pids]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
