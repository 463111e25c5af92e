"""Alignment: five points come to rest where they belong, the largest face is taken, and a missing detector is said."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from plsc.serve.detect import REFERENCE, align, find_detector, largest_face, similarity


def turned(scale: float, degrees: float, shift: tuple[float, float]) -> np.ndarray:
    """The reference points of a face of that size, turned and moved."""
    angle = np.radians(degrees)
    turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return REFERENCE @ turn.T + shift


@pytest.mark.parametrize(("scale", "degrees"), [(1.0, 0.0), (2.5, 30.0), (0.7, -120.0)])
def test_similarity_is_found_exactly_and_is_the_best(scale: float, degrees: float) -> None:
    points = turned(scale, degrees, (40, 90))
    matrix = similarity(REFERENCE, points)
    np.testing.assert_allclose(REFERENCE @ matrix[:, :2].T + matrix[:, 2], points, atol=1e-9)
    noisy = points + np.random.default_rng(0).normal(0, 3, points.shape)
    best = similarity(REFERENCE, noisy)

    def error(m: np.ndarray) -> float:
        return float(((REFERENCE @ m[:, :2].T + m[:, 2] - noisy) ** 2).sum())

    assert all(error(best) <= error(best + delta) for delta in small_similarities())


def small_similarities() -> list[np.ndarray]:
    return [
        sign * 1e-3 * np.array(m, float)
        for sign in (-1, 1)
        for m in ([[1, 0, 0], [0, 1, 0]], [[0, -1, 0], [1, 0, 0]], [[0, 0, 100], [0, 0, 0]], [[0, 0, 0], [0, 0, 100]])
    ]


@pytest.mark.parametrize("size", [112, 224])
def test_a_face_comes_to_rest_where_networks_expect_it(size: int) -> None:
    points = turned(2.0, 25.0, (120, 60))
    image = Image.new("RGB", (500, 500))
    pen = ImageDraw.Draw(image)
    for (x, y), color in zip(points, [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)], strict=True):
        pen.ellipse((x - 6, y - 6, x + 6, y + 6), fill=color)
    other = turned(0.3, 0, (5, 5))
    faces = [(100.0, other), (5000.0, points)]
    crop = largest_face(np.asarray(image), lambda pixels: faces, size)
    np.testing.assert_array_equal(crop, align(np.asarray(image), points, size))
    for (x, y), color in zip(REFERENCE * size / 112, [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)], strict=True):
        np.testing.assert_allclose(crop[int(y), int(x)], color, atol=40)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_detector("none") is None
    with pytest.raises(ValueError, match="expected one of none, auto"):
        find_detector("yes")
    monkeypatch.setitem(__import__("sys").modules, "insightface.model_zoo", None)
    with pytest.raises(ValueError, match="no face detector is installed"):
        find_detector("auto", models=tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "insightface.model_zoo", pytest)
    with pytest.raises(ValueError, match=r"has no det_\*\.onnx"):
        find_detector("auto", models=tmp_path)
    with pytest.raises(ValueError, match="image: the detector finds no face"):
        largest_face(np.zeros((9, 9, 3), np.uint8), lambda pixels: [], 112)
