"""plsc-train --check: what it finds wrong between ranks, in sentences; ranks are threads with real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plsc.comm import FailedTogether, probe
from plsc.comm.launch import Launch
from plsc.comm.probe import Link, Responder, Unreachable, own_address, visit
from plsc.strategies import Strategy
from plsc.train import check as module
from plsc.train.check import check
from plsc.train.config import Config, DataConfig, dump

ROOT = Path(__file__).resolve().parents[2]
BASE = Config(
    batch_size=12, data=DataConfig(kind="synthetic", image_size=8, channels=1, num_classes=8, num_samples=96, workers=0)
)


def find_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def run(*configs: Config, absent: int = -1) -> tuple[list[str], list[Any]]:
    """What rank 0 said, and what each rank returned or raised."""
    port, said, ends = str(find_port()), [], [None] * len(configs)

    def body(rank: int) -> None:
        try:
            launch = Launch(rank, len(configs), rank, "127.0.0.1", port)
            ends[rank] = check(configs[rank], say=said.append, launch=launch)
        except Exception as error:
            ends[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(configs)) if rank != absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return said, ends


def complaint(*configs: Config, absent: int = -1) -> str:
    _, ends = run(*configs, absent=absent)
    assert isinstance(ends[0], FailedTogether), ends
    assert all(end is False for rank, end in enumerate(ends) if rank not in (0, absent)), ends
    return str(ends[0])


def test_ranks_that_are_ready() -> None:
    said, ends = run(BASE, replace(BASE, nproc=7), BASE)
    assert ends == [True] * 3
    text = "\n".join(said)
    for words in ("ranks: ranks 0, 1, 2 on ", "torch ", "(lo, as ", "data: 96 images of 8 classes", "links: 6 of 6;"):
        assert words in text, text
    assert said[-1] == "ready: batches of 12, 4 a rank and optimizer step"


def test_a_world_of_one() -> None:
    said, ends = run(BASE)
    assert ends == [True] and said[-1].startswith("ready:") and not any("links" in line for line in said)
    _, (error,) = run(replace(BASE, data=DataConfig(kind="folder", path="/nowhere")))
    assert isinstance(error, FailedTogether) and "/nowhere" in str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy": Strategy(amp="bf16")}, "setting strategy.amp differs: 'fp32' on ranks 0, 2, 'bf16' on rank 1"),
        (
            {"data": replace(BASE.data, num_samples=95)},
            "data: number of images differs: 96 on ranks 0, 2, 95 on rank 1",
        ),
        ({"data": replace(BASE.data, labels="zipf")}, "data: digest of labels differs: "),
        ({"data": DataConfig(kind="folder", path="/nowhere")}, "rank 1: "),
        ({"batch_size": 13}, "setting batch_size differs: 12 on ranks 0, 2, 13 on rank 1"),
    ],
)
def test_ranks_that_differ(change: dict[str, Any], words: str) -> None:
    assert words in complaint(BASE, replace(BASE, **change), BASE)


def test_a_batch_that_does_not_divide() -> None:
    text = complaint(*[replace(BASE, batch_size=9)] * 2)
    assert text == "the ranks are not ready: \n  batch_size is 9, expected a multiple of ranks * accumulate = 2"


def test_versions_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    about = module.about_this_rank

    def other(config: Config, launch: Launch) -> dict[str, Any]:
        facts = about(config, launch)
        return facts | {"versions": facts["versions"] | {"torch": "1.0"}} if launch.rank == 1 else facts

    monkeypatch.setattr(module, "about_this_rank", other)
    assert "torch differs: " in complaint(BASE, BASE) and "'1.0' on rank 1" in complaint(BASE, BASE)


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COME_SECONDS", 1.0)
    assert "rank 1 did not come within 1 s" in complaint(BASE, BASE, BASE, absent=1)


def test_nobody_to_meet() -> None:
    with pytest.raises(Unreachable, match=r"rank 1 .* cannot reach 127.0.0.1:\d+, where the ranks are to meet"):
        probe.meet(Launch(1, 2, None, "127.0.0.1", str(find_port())), seconds=0.5)


def test_a_rank_that_nobody_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is closed after it was told: to the others it looks like a firewall."""
    start = Responder.__init__

    def closed(self: Responder, address: str) -> None:
        start(self, address)
        if threading.current_thread().name == "closed":
            self.__exit__()

    monkeypatch.setattr(Responder, "__init__", closed)
    about = module.about_this_rank

    def mark(config: Config, launch: Launch) -> dict[str, Any]:
        threading.current_thread().name = "closed" if launch.rank == 2 else "open"
        return about(config, launch)

    monkeypatch.setattr(module, "about_this_rank", mark)
    text = complaint(BASE, BASE, BASE)
    assert text.count("does not reach rank 2") == 2 and "Connection refused" in text and "reach rank 1" not in text


def test_clocks_and_slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(peer: int, address: str, port: int) -> Link:
        slow = peer == 1 and threading.get_ident() == first[0]
        return Link(peer, delay=1e-3, rate=1e6 if slow else 1e8, ahead=-7.5 if peer == 2 else 0.0)

    first: list[int] = []
    about = module.about_this_rank

    def note(config: Config, launch: Launch) -> dict[str, Any]:
        if launch.rank == 0:
            first.append(threading.get_ident())
        return about(config, launch)

    monkeypatch.setattr(module, "about_this_rank", note)
    monkeypatch.setattr(module, "visit", seen)
    said, ends = run(BASE, BASE, BASE)
    assert "the clock of rank 2 " in str(ends[0]) and "is 7.5 s behind rank 0's" in str(ends[0])
    assert "slow: rank 0 to rank 1, 1.0 MB/s" in said


def test_a_link_is_measured() -> None:
    with Responder("127.0.0.1") as responder:
        link = visit(4, "127.0.0.1", responder.port)
    assert link.peer == 4 and not link.error and 0 < link.delay < 5 and link.rate > 1e5 and abs(link.ahead) < 5
    assert visit(4, "127.0.0.1", responder.port).error


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("gloo", "127.0.0.1") == ("127.0.0.1", "lo, as GLOO_SOCKET_IFNAME says")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME is 'eth77', expected one of .*lo"):
        own_address("gloo", "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert "name" in own_address("gloo", "127.0.0.1")[1]
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert own_address("nccl", "127.0.0.1") == ("127.0.0.1", "the way to 127.0.0.1")


def test_a_loopback_address_between_hosts_is_found() -> None:
    facts = [
        {"host": f"h{rank}", "address": "127.0.1.1", "interface": "what the host's name resolves to", "backend": "gloo"}
        for rank in range(2)
    ]
    first, second = module.about_links(facts, [[], []])
    assert first.startswith("rank 0 (host h0) would tell the others 127.0.1.1") and "set GLOO_SOCKET_IFNAME" in second


@pytest.mark.slow
@pytest.mark.parametrize("good", [True, False])
def test_the_command(good: bool, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump(replace(BASE, nproc=2, out=str(tmp_path / "out"))))
    command = [sys.executable, "-m", "plsc.cli", "train", str(tmp_path / "run.toml"), "--check"]
    flags = [] if good else ["--batch-size", "13"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *flags], env=env, capture_output=True, text=True, timeout=150, check=False)
    if good:
        assert done.returncode == 0 and "links: 2 of 2" in done.stdout and done.stderr == "", done.stderr
    else:
        assert done.returncode == 1
        expected = (
            "error: the ranks are not ready: \n  batch_size is 13, expected a multiple of ranks * accumulate = 2\n"
        )
        assert done.stderr == expected
    assert not (tmp_path / "out").exists()
