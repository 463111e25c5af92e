"""The loader: equal order on any number of ranks and workers, exact resume, named errors."""

import faulthandler
import gc
import io
import json
import logging
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
from torch import Tensor

from plsc.data import Augment, ImageFolder, Loader, ReadingProcessDied, Synthetic, TarShards, batches
from plsc.data.pipeline import Buffers
from plsc.data.reading import Transform
from plsc.data.tar import TarWriter

N, B = 50, 12


class Numbers:
    """Sample i is a picture whose pixels say i; label i % 7. `broken` samples raise."""

    def __init__(self, count: int = N, broken: tuple[int, ...] = ()) -> None:
        self.labels, self.num_classes, self.broken = np.arange(count) % 7, 7, broken

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        return f"number-{i}.jpg"

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if i in self.broken:
            raise OSError("disk on fire")
        return np.full((3, 2, 3), i % 256, np.uint8), int(self.labels[i])


def jitter(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, image.shape, np.uint8)


def numbers(images: Tensor) -> list[int]:
    return (images[:, 0, 0, 0] * 127.5 + 127.5).round().int().tolist()


def order(world_size: int, epochs: int, state: dict | None = None, steps: int | None = None) -> list[list[int]]:
    """The samples of each step, ranks one after the other."""
    loaders = [Loader(Numbers(), B, rank=r, world_size=world_size, seed=5) for r in range(world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    found = []
    for parts in zip(*(loader.epochs(epochs) for loader in loaders), strict=True):
        assert all(len(labels) == B // world_size for _, labels in parts)
        for images, labels in parts:
            assert labels.tolist() == [i % 7 for i in numbers(images)]
        found.append([i for images, _ in parts for i in numbers(images)])
        if len(found) == steps:
            break
    assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
    return found


def test_order_is_the_same_on_any_number_of_ranks() -> None:
    one = order(1, 3)
    assert len(one) == 3 * (N // B)
    for epoch in range(3):
        assert len({i for step in one[4 * epoch : 4 * epoch + 4] for i in step}) == 48  # no repeats; 2 of 50 left out
    assert one[:4] != one[4:8]
    for world_size in (2, 3, 4):
        assert order(world_size, 3) == one


@pytest.mark.parametrize("steps", range(1, 9))
def test_resume_after_any_step_and_on_other_ranks(steps: int) -> None:
    whole = order(1, 2)
    loader = Loader(Numbers(), B, seed=5)
    done = []
    for images, _ in loader.epochs(2):
        done.append(numbers(images))
        if len(done) == steps:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["epoch"] * 4 + state["position"] // B == steps or steps == 8
    assert done + order([1, 2, 3, 4][steps % 4], 2, state) == whole


def test_place_within_the_loop() -> None:
    loader = Loader(Numbers(), B)
    assert (loader.epoch, loader.position, loader.steps_per_epoch) == (0, 0, 4)
    places = [(loader.epoch, loader.position) for _ in loader.epochs(2)]
    assert places == [(e, B * s) for e in (0, 1) for s in (1, 2, 3, 4)]
    assert (loader.epoch, loader.position) == (2, 0)
    assert list(loader.epochs(2)) == [] and len(list(loader.epochs(3))) == 4


def test_leaving_the_loop_and_coming_back_goes_on() -> None:
    whole, loader = order(1, 2), Loader(Numbers(), B, seed=5)
    found = []
    for stop in (3, 6, 99):
        for images, _ in loader.epochs(2):
            found.append(numbers(images))
            if len(found) == stop:
                break
    assert found == whole


def test_without_shuffle() -> None:
    found = [numbers(images) for images, _ in Loader(Numbers(), B, shuffle=False).epochs(1)]
    assert found == [list(range(s, s + B)) for s in range(0, 48, B)]


def test_state_of_another_run_is_refused() -> None:
    loader = Loader(Numbers(), B, seed=5)
    state = loader.state_dict()
    for change in ({"seed": 6}, {"num_samples": 51}, {"shuffle": False}):
        word = "51 samples" if "num_samples" in change else f"{next(iter(change))}="
        with pytest.raises(ValueError, match=f"{word}.* this loader"):
            loader.load_state_dict({**state, **change})
    for change in ({"epoch": -1}, {"position": 51}):
        with pytest.raises(ValueError, match="expected 0 <= position"):
            loader.load_state_dict({**state, **change})
    with pytest.raises(ValueError, match="lacks labels, position, seed"):
        loader.load_state_dict({key: state[key] for key in ("epoch", "shuffle", "num_samples")})


def test_images_are_normalised() -> None:
    dataset = Synthetic(8, 2, image_size=9)
    (images, labels), *_ = Loader(dataset, 8, shuffle=False).epochs(1)
    raw = torch.from_numpy(np.stack([dataset[i][0] for i in range(8)])).permute(0, 3, 1, 2)
    assert images.dtype == torch.float32 and labels.dtype == torch.int64
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, (raw.float() - 127.5) / 127.5)


def test_no_number_of_torch_is_taken() -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    for _ in Loader(Numbers(), B).epochs(2):
        pass
    assert torch.equal(state, torch.random.get_rng_state())


def collected(
    workers: int, world_size: int, transform: Transform, epochs: int = 2, method: str | None = None
) -> Tensor:
    """All images of two epochs, in global order."""
    loaders = [
        Loader(Numbers(), B, rank=r, world_size=world_size, transform=transform, workers=workers, start_method=method)
        for r in range(world_size)
    ]
    parts = zip(*(loader.epochs(epochs) for loader in loaders), strict=True)
    return torch.cat([images.clone() for ranks in parts for images, _ in ranks])


def test_augmentation_depends_on_seed_epoch_and_sample_only() -> None:
    one = collected(0, 1, jitter)
    assert torch.equal(one, collected(0, 3, jitter))
    assert torch.equal(one, collected(2, 1, jitter))
    again = torch.cat([images for images, _ in Loader(Numbers(), B, transform=jitter, seed=1).epochs(1)])
    assert not torch.equal(again, one[: len(again)])
    # A sample looks different in the next epoch.
    plain = collected(0, 1, Augment(flip=False))
    first, second = (dict(zip(numbers(plain[e : e + 48]), one[e : e + 48], strict=True)) for e in (0, 48))
    shared = first.keys() & second.keys()
    assert len(shared) > 40 and not any(torch.equal(first[i], second[i]) for i in shared)


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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_sample_is_named(workers: int) -> None:
    loader = Loader(Numbers(broken=(17,)), B, workers=workers)
    with pytest.raises(ValueError, match=r"^sample 17 \(number-17.jpg\) cannot be read: OSError: disk on fire; mend"):
        list(loader.epochs(1))
    with pytest.raises(ValueError, match=r"^sample 17 .* disk on fire; mend or remove it$"):
        list(batches(Numbers(broken=(17,)), B, workers=workers))


def test_a_broken_transform_and_odd_images_are_named() -> None:
    def fail(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        raise KeyError("angle")

    with pytest.raises(RuntimeError, match=r"number-0.jpg\) cannot be changed: KeyError: 'angle'"):
        next(Loader(Numbers(), B, transform=fail).epochs(1))
    with pytest.raises(RuntimeError, match=r"is float32 \(3, 2, 3\), expected uint8"):
        next(Loader(Numbers(), B, transform=lambda image, rng: image.astype(np.float32)).epochs(1))
    with pytest.raises(RuntimeError, match=r"has shape \(4, 2, 3\) \(H, W, C\), others \(3, 2, 3\)"):
        list(
            Loader(
                Numbers(),
                B,
                transform=lambda image, rng: image if image[0, 0, 0] < 9 else image.repeat(4 // 3 + 1, 0)[:4],
            ).epochs(1)
        )


def redrawn(world_size: int, workers: int, broken: tuple[int, ...], count: int = 300) -> tuple[list, list[Loader]]:
    """Two epochs, the ranks' batches one after the other, as (pixel, label)."""
    dataset = Numbers(count, broken)
    loaders = [
        Loader(dataset, B, rank=r, world_size=world_size, seed=5, workers=workers, on_bad_image="redraw")
        for r in range(world_size)
    ]
    found = []
    for parts in zip(*(loader.epochs(2) for loader in loaders), strict=True):
        for images, labels in parts:
            found += [(pixel % 256, label) for pixel, label in zip(numbers(images), labels.tolist(), strict=True)]
    return found, loaders


def test_bad_images_are_replaced_alike_on_any_number_of_ranks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        one, (loader,) = redrawn(1, 0, (17,), 200)
    assert len(one) == 2 * 192 and loader.num_bad in (1, 2)
    assert all(pixel != 17 and label == pixel % 7 for pixel, label in one)  # with the label of the one that is shown
    whole, _ = redrawn(1, 0, (), 200)
    assert sum(a != b for a, b in zip(one, whole, strict=True)) == loader.num_bad
    assert caplog.text.count("number-17.jpg") == 1  # once, though it is bad in both epochs
    assert redrawn(2, 0, (17,), 200)[0] == one == redrawn(3, 0, (17,), 200)[0]
    assert redrawn(1, 2, (17,), 200)[0] == one


def test_a_bad_first_image_is_no_hindrance() -> None:
    assert len(redrawn(1, 0, (0,), 200)[0]) == 2 * 192


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_bad_images_stop_the_epoch(workers: int) -> None:
    few = r"got \d images .* among the 300 that a rank .* at most 3 \(3; 1 % where that is more\): sample \d+ \(number-"
    with pytest.raises(ValueError, match=few):
        redrawn(1, workers, tuple(range(0, 300, 2))[:60])
    with pytest.raises(ValueError, match=r"got \d+ images .* among the 500 .* at most 5 \(1 %\)"):
        redrawn(1, workers, tuple(range(0, 500, 5)), 500)
    assert redrawn(1, workers, (1, 2), 40)[1][0].num_bad >= 2  # one in 20, but so few may be
    with pytest.raises(ValueError, match=r"none of 101 samples drawn in turn can be read"):
        redrawn(1, 0, tuple(range(50)), 50)


def test_only_what_the_data_set_cannot_read_is_replaced() -> None:
    class Odd(Numbers):
        def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
            raise KeyError("a mistake in the code")

    with pytest.raises(RuntimeError, match="KeyError"):
        next(Loader(Odd(), B, on_bad_image="redraw").epochs(1))

    def fail(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        raise ValueError("angle")

    with pytest.raises(RuntimeError, match="cannot be changed: ValueError: angle"):
        next(Loader(Numbers(), B, transform=fail, on_bad_image="redraw").epochs(1))
    with pytest.raises(ValueError, match="on_bad_image='skip', expected one of redraw, raise"):
        Loader(Numbers(), B, on_bad_image="skip")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 10, "world_size": 4}, "multiple of 4; use 8"),
        ({"batch_size": 3, "world_size": 4}, "multiple of 4; use 4"),
        ({"batch_size": 0}, "global batch_size of 0"),
        ({"batch_size": 51}, "50 samples, fewer than one global batch of 51"),
        ({"rank": 2, "world_size": 2}, "0 <= rank < world_size"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_arguments(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(Numbers(), **{"batch_size": B, **kwargs})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(50), "got labels as float64"),
        (np.zeros((50, 1), int), r"got labels as int64 \(50, 1\)"),
        ([0] * 50, "got labels as list"),
        (np.zeros(49, int), "49 labels for 50 samples"),
        (np.full(50, -2), "labels from -2 to -2"),
        (np.arange(50), "labels from 0 to 49 with num_classes=7"),
        (np.zeros(50, np.bool_), "got labels as bool"),
    ],
)
def test_bad_labels(labels: object, message: str) -> None:
    class Wrong(Numbers):
        def __len__(self) -> int:
            return 50

    dataset = Wrong()
    dataset.labels = labels  # type: ignore[assignment]
    with pytest.raises(ValueError, match=message):
        Loader(dataset, B)


def test_ignored_samples_and_other_integers_pass() -> None:
    dataset = Numbers()
    dataset.labels = np.full(50, -1, np.int8)
    (_, labels), *_ = Loader(dataset, B).epochs(1)
    assert labels.dtype == torch.int64 and labels.tolist() == [-1] * B


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_in_order(workers: int) -> None:
    found = list(batches(Numbers(), 8, start=3, stop=30, workers=workers))
    assert [len(labels) for _, labels in found] == [8, 8, 8, 3]
    assert [i for images, _ in found for i in numbers(images)] == list(range(3, 30))
    assert [label for _, labels in found for label in labels.tolist()] == [i % 7 for i in range(3, 30)]


def test_batches_ranges() -> None:
    assert list(batches(Numbers(), 8, start=5, stop=5)) == []
    assert sum(len(labels) for _, labels in batches(Numbers(), 8)) == 50
    for kwargs in ({"start": 6, "stop": 5}, {"stop": 51}, {"start": -1}):
        with pytest.raises(ValueError, match="expected one within 0 to 50"):
            batches(Numbers(), 8, **kwargs)
    with pytest.raises(ValueError, match="batch_size=0"):
        batches(Numbers(), 0)


def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    buffers = Buffers(kept=2)
    a = buffers.take((2, 3))
    view, place = a[:1], a.data_ptr()
    del a
    assert buffers.take((2, 3)).data_ptr() != place  # the view holds it
    weight = torch.ones(3, requires_grad=True)
    output = (view * weight).sum()
    del view
    assert buffers.take((2, 3)).data_ptr() != place  # autograd holds it
    output.backward()
    del output
    assert place in {buffers.take((2, 3)).data_ptr()}
    kept = [buffers.take((2, 3)) for _ in range(5)]
    assert len({t.data_ptr() for t in kept}) == 5


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


def test_kept_batches_do_not_change() -> None:
    kept = [images for images, _ in Loader(Numbers(), B, seed=5).epochs(3)]
    assert [numbers(images) for images in kept] == order(1, 3)


def test_folder_through_the_loader(shared: Path) -> None:
    dataset = ImageFolder(shared / "data/faces/lfw112_val.zip")
    images, labels = next(Loader(dataset, 8, transform=Augment(), workers=1).epochs(1))
    assert images.shape == (8, 3, 112, 112) and -1 <= images.min() < images.max() <= 1 and labels.max() < 500


def test_a_batch_for_a_gpu_travels_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and labels: else the host waits for the copy. Tensors stay here; what is asked of them is noted."""
    pinned: list[Tensor] = []
    sent: list[tuple[torch.dtype, bool]] = []

    def pin_memory(x: Tensor) -> Tensor:
        pinned.append(x.clone())
        return pinned[-1]

    def to(x: Tensor, place: object, **options: bool) -> Tensor:
        if isinstance(place, torch.dtype):
            return x.type(place)
        assert place == torch.device("cuda", 0) and any(x is each for each in pinned)
        sent.append((x.dtype, options["non_blocking"]))
        return x

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    loader = Loader(Numbers(), B, device=torch.device("cuda", 0), shuffle=False)
    images, labels = next(iter(loader.epochs(1)))
    assert sent == [(torch.uint8, True), (torch.int64, True)]
    assert images.dtype == torch.float32 and labels.tolist() == [i % 7 for i in range(B)]
