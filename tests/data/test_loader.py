"""The loader: equal order on any number of ranks, exact resume, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from plsc.data import Augment, ImageFolder, Loader, Synthetic, batches
from plsc.data.pipeline import Buffers
from plsc.data.reading import Transform

from .numbered import B, N, Numbers, numbers, order


def jitter(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, image.shape, np.uint8)


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
