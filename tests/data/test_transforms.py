"""Augmentations: what each changes, and that the generator alone decides."""

import pickle

import numpy as np
import pytest

from plsc.data import Augment

IMAGE = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)


def runs(augment: Augment, count: int = 60) -> list[np.ndarray]:
    return [augment(IMAGE, np.random.default_rng(seed)) for seed in range(count)]


def test_the_generator_decides() -> None:
    augment = Augment(crop=3, brightness=0.2, contrast=0.2, erase=0.5)
    again = pickle.loads(pickle.dumps(augment))
    before = IMAGE.copy()
    for a, b in zip(runs(augment), runs(again), strict=True):
        assert a.shape == IMAGE.shape and a.dtype == np.uint8 and (a == b).all()
    assert (before == IMAGE).all()


def test_flip_mirrors_half_of_the_images() -> None:
    flipped = [not (image == IMAGE).all() for image in runs(Augment(), 200)]
    assert 70 < sum(flipped) < 130
    mirrored = runs(Augment(), 200)[flipped.index(True)]
    assert (mirrored == IMAGE[:, ::-1]).all()
    assert all((image == IMAGE).all() for image in runs(Augment(flip=False)))


def test_crop_shifts_and_repeats_the_edge() -> None:
    padded = np.pad(IMAGE, ((2, 2), (2, 2), (0, 0)), mode="edge")
    windows = {padded[y : y + 12, x : x + 10].tobytes() for y in range(5) for x in range(5)}
    found = {image.tobytes() for image in runs(Augment(flip=False, crop=2), 200)}
    assert found <= windows and len(found) > 20


def test_light_and_contrast_stay_in_range() -> None:
    light = runs(Augment(flip=False, brightness=0.5))
    assert all(abs(image.astype(int) - IMAGE).max() <= 128 for image in light)
    assert len({image.tobytes() for image in light}) > 50
    grey = np.full((4, 4, 1), 128, np.uint8)
    assert (Augment(flip=False, contrast=1)(grey, np.random.default_rng(0)) - grey.astype(int)).max() <= 1


def test_erase_paints_one_rectangle() -> None:
    for image in runs(Augment(flip=False, erase=1)):
        rows, columns = np.nonzero((image != IMAGE).any(-1))
        area = image[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert (area == area[0, 0, 0]).all() and area.shape[0] <= 6 and area.shape[1] <= 5


@pytest.mark.parametrize("kwargs", [{"crop": -1}, {"brightness": 2}, {"contrast": -0.1}, {"erase": 1.1}])
def test_bad_arguments(kwargs: dict) -> None:
    with pytest.raises(ValueError, match="got"):
        Augment(**kwargs)
