"""The report's figures: confusion by a twin that loops, and pictures that are pictures."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc.train.plots import plot_confusion, plot_contact_sheet, plot_scores
from plsc.train.report import confusion


def twin(rows: np.ndarray, labels: np.ndarray) -> dict[int, tuple[int, int]]:
    """For each sample its class and the one it is nearest to."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found = {}
    for i, label in enumerate(labels):
        if label < 0 or (labels == label).sum() < 2:
            continue
        scores = {}
        for other in np.unique(labels[labels >= 0]):
            if (labels == other).sum() < 2:
                continue
            mean = unit[(labels == other) & (np.arange(len(labels)) != i)].sum(0)
            scores[int(other)] = float(mean @ unit[i] / np.linalg.norm(mean))
        found[i] = (int(label), max(scores, key=lambda one: scores[one]))
    return found


def test_confusion_is_that_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 9, 120)
    labels[labels == 7] = -1
    labels[0] = 7  # a class of one sample
    rows = rng.standard_normal((10, 6))[labels] + 0.8 * rng.standard_normal((120, 6))
    judged = twin(rows, labels)
    found = confusion(rows, labels, most=100)
    assert found.num_judged == len(judged)
    assert found.num_wrong == sum(own != taken for own, taken in judged.values()) > 5
    for i, own in enumerate(found.classes):
        for j, taken in enumerate(found.classes):
            assert found.counts[i, j] == sum(pair == (own, taken) for pair in judged.values())
    few = confusion(rows, labels, most=3)
    for own, row in zip(few.classes, few.counts, strict=True):
        assert row.sum() == sum(pair[0] == own for pair in judged.values())  # no sample of a row is left out
        assert row[-1] == sum(pair[0] == own and pair[1] not in few.classes for pair in judged.values())
    assert few.counts[:, -1].any() and not found.counts[:, -1].any()
    assert len(few.classes) == 3 and few.num_wrong == found.num_wrong
    assert confusion(rows, np.full(120, 4)).counts.shape == (0, 1)


def test_pictures(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grey, color = (rng.integers(0, 256, (8, 8, c)).astype(np.uint8) for c in (1, 3))
    paths = [
        plot_scores(rng.uniform(-1, 1, 50), np.arange(50) % 2 == 0, tmp_path / "scores.png", threshold=0.3),
        plot_contact_sheet([[(grey, "a"), (color, "0.5")], [(color, "b")]], tmp_path / "sheet.png"),
        plot_confusion(
            np.array([[3, 1, 0], [0, 2, 4]]), ["one", "a very long name of a class indeed"], tmp_path / "c.png"
        ),
    ]
    for path in paths:
        with Image.open(path) as image:
            assert image.format == "PNG" and len(image.convert("L").getcolors(256) or []) > 5
    with pytest.raises(ValueError, match="expected \\[P\\] of both kinds"):
        plot_scores([1.0], [True], tmp_path / "x.png")
    with pytest.raises(ValueError, match="at least one row"):
        plot_contact_sheet([], tmp_path / "x.png")
    with pytest.raises(ValueError, match="one row and column"):
        plot_confusion(np.ones((2, 2), np.int64), ["a"], tmp_path / "x.png")
