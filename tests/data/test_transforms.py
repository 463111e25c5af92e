"""Augmentations: what each changes, and that the generator alone decides."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from plsc.data import AUGMENTS, Augment

IMAGE = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)


def runs(augment: Augment, count: int = 60) -> list[np.ndarray]:
    return [augment(IMAGE, np.random.default_rng(seed)) for seed in range(count)]


def test_the_generator_decides() -> None:
    augment = replace(AUGMENTS["strong"], flip=True, crop=3, blur=0.5, grey=0.5, low_resolution=0.5)
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


def test_grey_and_saturation_keep_the_light() -> None:
    luma = IMAGE @ np.array([0.299, 0.587, 0.114])
    for image in runs(Augment(flip=False, grey=1), 3):
        assert (image == image[..., :1]).all() and abs(image[..., 0] - luma).max() <= 0.51
    calm = np.full((4, 4, 3), (120, 130, 140), np.uint8)
    for seed in range(20):
        found = Augment(flip=False, saturation=1)(calm, np.random.default_rng(seed)).astype(int)
        assert abs(found @ np.array([0.299, 0.587, 0.114]) - 128.15).max() < 1.1
    one = IMAGE[..., :1]
    assert (Augment(flip=False, saturation=1, grey=1)(one, np.random.default_rng(0)) == one).all()


def test_blur_and_low_resolution_smooth() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)
    for augment in (Augment(flip=False, blur=1), Augment(flip=False, low_resolution=1)):
        for channels in (3, 1):
            image = np.ascontiguousarray(noise[..., :channels])
            found = [augment(image, np.random.default_rng(seed)) for seed in range(8)]
            assert all(each.shape == image.shape for each in found)
            steps = [abs(np.diff(each.astype(int), axis=0)).mean() for each in found]
            assert np.mean(steps) < 0.8 * abs(np.diff(image.astype(int), axis=0)).mean()
            assert len({each.tobytes() for each in found}) > 4


@pytest.mark.parametrize("name", AUGMENTS)
def test_named_strengths(name: str) -> None:
    changed = [not (image == IMAGE).all() for image in runs(AUGMENTS[name])]
    assert any(changed) == (name != "none")


@pytest.mark.parametrize("kwargs", [{"crop": -1}, {"blur": 1.5}, {"grey": -1}, {"brightness": 2}, {"erase": 1.1}])
def test_bad_arguments(kwargs: dict) -> None:
    with pytest.raises(ValueError, match="got"):
        Augment(**kwargs)
