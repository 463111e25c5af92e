"""Ranks that are real processes, for tests of the backends between them; NCCL for ranks that are threads."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import plsc.comm.nccl_session as nccl_session
from tests.comm import nccl_stand_in
from tests.comm.nccl_stand_in import Stand, stand

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., list[subprocess.Popen[str]]]


def find_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def free_port() -> int:
    return find_port()


@pytest.fixture
def start_ranks() -> Iterator[Start]:
    """start_ranks(script, world_size, *args): the processes, in rank order; none of them outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(script: Path, world_size: int, *args: str) -> list[subprocess.Popen[str]]:
        place = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_port()}
        shared = {**place, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(world_size):
            own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
            env = {**os.environ, **{name: str(value) for name, value in own.items()}}
            command = [sys.executable, str(script), *args]
            started.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        return started[-world_size:]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def outputs(processes: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """What each process wrote until its end; one that takes longer is killed. Read side by side, for pipes fill up."""
    texts = [""] * len(processes)

    def read(index: int) -> None:
        try:
            texts[index] = processes[index].communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            processes[index].kill()
            texts[index] = processes[index].communicate()[0] + f"\nkilled after {seconds} s"

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


@pytest.fixture
def finish_ranks() -> Callable[[list[subprocess.Popen[str]], float], list[str]]:
    """finish_ranks(processes, seconds): waits for them and returns their outputs."""
    return outputs


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """stand_in(comm): NCCL's communicator over the stand-in for CuPy, CUDA's streams and events."""
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(nccl_stand_in, name))
    monkeypatch.setattr(torch.Tensor, "record_stream", nccl_stand_in.record_stream)
    monkeypatch.setattr(nccl_session, "POLL", 0.01)
    return stand
