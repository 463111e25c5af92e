"""The loader and samples that cannot be read: named, or replaced alike on any number of ranks."""

import logging

import numpy as np
import pytest

from plsc.data import Loader, batches

from .numbered import B, Numbers, numbers


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
