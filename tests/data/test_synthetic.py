"""Made-up images: what they depend on, and that their classes can be told apart."""

import numpy as np
import pytest

from plsc.data import Synthetic


def test_samples_depend_on_seed_and_number_only() -> None:
    a, b = Synthetic(100, 10, image_size=20), Synthetic(1000, 10, image_size=20)
    for i in (0, 7, 99):
        assert (a[i][0] == b[i][0]).all() and a[i][1] == b[i][1] == i % 10
    assert a[3][0].shape == (20, 20, 3) and a[3][0].dtype == np.uint8
    assert not (a[3][0] == a[13][0]).all()
    assert not (a[3][0] == Synthetic(100, 10, image_size=20, seed=1)[3][0]).all()
    assert Synthetic(4, 2, image_size=9, channels=1)[0][0].shape == (9, 9, 1)


def test_nearest_class_mean_is_right() -> None:
    dataset = Synthetic(200, 20, image_size=16)
    images = np.stack([dataset[i][0].ravel() for i in range(200)]).astype(np.float32)
    means = np.stack([images[:100][dataset.labels[:100] == c].mean(0) for c in range(20)])
    distance = ((images[100:, None] - means) ** 2).sum(-1)
    assert (distance.argmin(1) == dataset.labels[100:]).all()


def test_zipf_labels() -> None:
    labels = Synthetic(100_000, 1000, labels="zipf").labels
    counts = np.bincount(labels, minlength=1000)
    assert labels.dtype == np.int64 and labels.min() == 0 and labels.max() < 1000
    assert counts[0] > 1.5 * counts[1] > 1.5 * counts[3] > 0
    assert 0.4 < counts[:31].sum() / 100_000 < 0.6  # half the samples in the first sqrt(classes)


@pytest.mark.parametrize(
    "kwargs", [{"num_samples": 0}, {"num_classes": 0}, {"image_size": 0}, {"channels": 4}, {"labels": "x"}]
)
def test_bad_arguments(kwargs: dict) -> None:
    with pytest.raises(ValueError, match="got"):
        Synthetic(**{"num_samples": 2, "num_classes": 2, **kwargs})
    with pytest.raises(IndexError):
        Synthetic(2, 2)[2]
