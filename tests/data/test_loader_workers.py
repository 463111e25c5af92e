"""The loader's reading processes: the same batches, memory that stays, and ends that are named."""

import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from plsc.data import Augment, Loader, ReadingProcessDied, Synthetic, TarShards
from plsc.data.tar import TarWriter

from .numbered import B, Numbers, numbers, order


@pytest.mark.slow
def test_spawned_worker_reads_the_same() -> None:
    """With a data set that a fresh process can import."""
    data = Synthetic(48, 6, image_size=8, channels=1)
    here, there = (
        torch.cat(
            [images for images, _ in Loader(data, B, transform=Augment(crop=1), workers=n, start_method=how).epochs(1)]
        )
        for n, how in ((0, None), (1, "spawn"))
    )
    assert torch.equal(here, there)


def test_workers_stay_over_epochs_and_end_with_close() -> None:
    loader = Loader(Numbers(), B, seed=5, workers=2)
    others = set(multiprocessing.active_children())
    found, workers = [], set()
    for images, _ in loader.epochs(2):
        found.append(numbers(images))
        workers |= set(multiprocessing.active_children()) - others
    assert found == order(1, 2) and len(workers) == 2
    loader.close()
    assert not any(worker.is_alive() for worker in workers)
    assert len(list(loader.epochs(3))) == 4


def test_leaving_the_loop_with_workers() -> None:
    whole, loader = order(1, 2), Loader(Numbers(), B, seed=5, workers=2)
    found = []
    for stop in (1, 6, 99):
        for images, _ in loader.epochs(2):
            found.append(numbers(images))
            if len(found) == stop:
                break
    assert found == whole


class Mortal(Numbers):
    """A data set one of whose samples ends the process that reads it."""

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__()
        self.end, self.process = end, os.getpid()

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if i == 17 and os.getpid() != self.process:
            self.end()
        return super().__getitem__(i)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            signal.SIGKILL,
            r"^rank 1, reading process \d of 2 \(pid \d+\) was killed \(signal 9; out of memory\?\)",
        ),
        (signal.SIGBUS, r"was killed \(signal 7; a mapped file was cut short, .* with `plsc-data verify`"),
        (signal.SIGTERM, r"was killed \(signal 15\)"),
    ],
)
def test_a_killed_worker_is_named_with_its_rank(number: int, message: str) -> None:
    before = set(multiprocessing.active_children())
    dataset = Mortal(lambda: (faulthandler.disable(), os.kill(os.getpid(), number)))
    loaders = [Loader(dataset, B, rank=rank, world_size=2, workers=2) for rank in range(2)]
    (rank,) = (r for r in range(2) if 17 in [i for step in order_of(loaders[r]) for i in step])
    with pytest.raises(ReadingProcessDied, match=message.replace("rank 1", f"rank {rank}")):
        list(loaders[rank].epochs(1))
    assert set(multiprocessing.active_children()) == before  # the others are gone too
    assert len(list(loaders[1 - rank].epochs(1))) == 4
    loaders[1 - rank].close()


def order_of(loader: Loader) -> list[list[int]]:
    """The samples of each step of an epoch, of this rank."""
    return [samples.tolist() for _, samples in loader._order]


def test_a_worker_that_ends_by_itself_is_named() -> None:
    loader = Loader(Mortal(lambda: os._exit(3)), B, workers=1)
    with pytest.raises(ReadingProcessDied, match=r"^reading process 0 of 1 .* ended by itself \(exit code 3\); a"):
        list(loader.epochs(1))


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import multiprocessing
from plsc.data import Loader, Synthetic
if __name__ == "__main__":
    loader = Loader(Synthetic(40, 4, image_size=8), 8, workers=2)
    next(loader.epochs(1))
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2, done.stderr
    deadline = time.monotonic() + 60
    while any(map(alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_an_error_of_a_worker_says_where() -> None:
    def fail(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        raise KeyError("angle")

    loader = Loader(Numbers(), B, workers=1, transform=fail)
    loader._pipeline = None
    with pytest.raises(RuntimeError, match=r"cannot be changed: KeyError: 'angle'"):
        list(loader.epochs(1))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to tell how much memory is held")
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_stays_over_epochs(tmp_path: Path, workers: int) -> None:
    """Of this process and the workers: 10 epochs hold no more than 2, to a few pages."""
    with TarWriter(tmp_path / "x.tar") as tar:
        for k in range(600):
            file = io.BytesIO()
            Image.fromarray(np.full((32, 32, 3), k % 256, np.uint8)).save(file, "JPEG")
            tar.write(f"a/{k}", ".jpg", k % 20, file.getvalue())

    def held() -> int:
        gc.collect()
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE")

    loader = Loader(TarShards(tmp_path / "x.tar", image_size=32), 64, transform=Augment(crop=2), workers=workers)
    after = []
    for epoch in range(1, 11):
        for _ in loader.epochs(epoch):
            pass
        after.append(held())
    loader.close()
    assert after[-1] - after[1] < 4 * 2**20, after
